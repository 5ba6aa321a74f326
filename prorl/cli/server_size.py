"""Estimates how many rollouts a model server serves at a time, by the size of its KV cache.

A vLLM states its blocks in `/metrics`; how many requests it runs at a time (`--max-num-seqs`) no
server states, so the user is told to compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import aiohttp

from prorl.backends.catalogue import address
from prorl.pluralize import pluralize
from prorl.waits import wait_limit_s

TIMEOUT_S = wait_limit_s("cli.metrics")

_CACHE = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(num_gpu_blocks|block_size)="(\d+)"')


def cache_tokens(metrics: str) -> int:
    """Tokens that all KV caches of a page of vLLM's metrics hold; 0 where it does not say.

    >>> cache_tokens('vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="91"} 1.0')
    2912
    """
    total = 0
    for match in _CACHE.finditer(metrics):
        labels = dict(_LABEL.findall(f",{match['labels']}"))
        total += int(labels.get("num_gpu_blocks", 0)) * int(labels.get("block_size", 0))
    return total


def size_lines(name: str, tokens: int, longest: int, slots: int, groups: int) -> Iterator[str]:
    """Yields the lines that say how many rollouts of `longest` tokens fill a server of `tokens`:
    `slots` are those that RUN has, `groups` the run's `max_open_groups` times its rollouts a group.

    >>> for line in size_lines("http://h:1", 700_000, 4096, 32, 256): print(line)
    http://h:1: 700000 tokens of KV cache hold 170 rollouts of 4096 tokens at a time
    32 slots leave it idle: --set service.run.slots=170, or vLLM's --max-num-seqs if that is less
    """
    if not tokens:
        yield f"{name}: states no size of its KV cache: give service.run.slots its --max-num-seqs"
        return
    rollouts = max(tokens // longest, 1)
    yield (
        f"{name}: {tokens} tokens of KV cache hold {pluralize(rollouts, 'rollout')} of {longest}"
        " tokens at a time"
    )
    if slots < rollouts:
        yield (
            f"{pluralize(slots, 'slot leaves', 'slots leave')} it idle: --set"
            f" service.run.slots={rollouts}, or vLLM's --max-num-seqs if that is less"
        )
    if groups < rollouts:
        idle = pluralize(groups, "rollout in open groups leaves", "rollouts in open groups leave")
        yield f"{idle} it idle: raise run.max_open_groups, too"


async def read_cache_tokens(name: str, key: str = "") -> int:
    """`cache_tokens` of a server; 0 where it has no such page or does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{address(name)}/metrics") as reply,
        ):
            return cache_tokens(await reply.text()) if reply.status == 200 else 0
    except (TimeoutError, OSError, aiohttp.ClientError, UnicodeError):
        return 0
