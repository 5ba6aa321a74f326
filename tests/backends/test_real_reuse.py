"""Prefix caches of two real vLLM servers: rollouts of six turns stay on their server and find what
they said before; the same prompts sent to servers at random do not.

`make test-vllm`; figures are printed with `-s`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import numpy as np
import pytest

from prorl.analysis.analyses import ANALYSES
from prorl.backends.probe import first_token
from prorl.backends.vllm import VllmBackend
from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from prorl.types import Json, Task
from tests.backends.embedded.helpers import RENDERER
from tests.backends.pool_rollouts import TEXT_ONLY_AGENT, TURNS, check_nothing_charged, config
from tests.backends.real_servers import NEEDS_VLLM, Server, serving, vllm
from tests.integration.run_checks import check_complete, rows

if TYPE_CHECKING:
    from prorl.types import Int32

pytestmark = NEEDS_VLLM

ROLLOUTS, BLOCK = 24, 32
BAR = 0.8
PROMPT = "Count from {0}. " + "Say each number once, then the next one. " * 5


class Tally(NamedTuple):
    repeated: int
    in_blocks: int
    """Those that whole blocks can hold."""
    cached: int


async def test_rollouts_reuse_the_cached_prefixes_of_their_earlier_turns(
    tmp_path: Path, sandbox_kind: str
) -> None:
    pool = [vllm(tmp_path, "vllm-0"), vllm(tmp_path, "vllm-1")]
    async with serving(*pool):
        root = tmp_path / "root"
        async with signals() as stop, service(config(root, sandbox_kind, pool), stop) as running:
            client = client_of(running)
            limits: Json = {"max_turns": TURNS, "max_tokens": 480, "run_s": 300}
            more: Json = {
                "agent": TEXT_ONLY_AGENT,
                "limits": limits,
                "sampling": {"max_tokens": 24},
            }
            await asyncio.to_thread(client.create_run, run_id="r", **more)
            tasks = [
                Task(task_id=f"t{i}", env="noop", prompt=PROMPT.format(i * 7919))
                for i in range(ROLLOUTS)
            ]
            await asyncio.to_thread(client.submit, "r", tasks, 1, key="w", last=True)
            await asyncio.wait_for(follow(client, running, "r", ROLLOUTS, quiet=True), 400)
            run = await asyncio.to_thread(client.run, "r")
        stored = check_complete(root / "r", ROLLOUTS)
        check_nothing_charged(stored, ROLLOUTS)
        ours = _tally(rows(stored, "from turns order by rollout_id, turn"))
        listed = {row["x"]: row["y"] for row in rows(stored, ANALYSES["reuse"].sql)}
        prompts = _prompts(rows(stored, "from sequences"), rows(stored, "from turns order by turn"))
        sticky = await _replay(pool, prompts, at_random=False)
        scattered = await _replay(pool, prompts, at_random=True)
    print(
        f"of what blocks of {BLOCK} can hold: {_share(ours):.3f} through the service,"
        f" {_share(sticky):.3f} when its prompts are sent again, {_share(scattered):.3f} with a"
        f" server at random for each call; of all that repeats {ours.cached / ours.repeated:.3f};"
        f" the run says {run['reused_share']:.3f}, SQL {listed}"
    )
    assert _share(ours) >= BAR
    assert run["reused_share"] == pytest.approx(ours.cached / ours.repeated, abs=0.02)
    assert _share(scattered) < 0.8 * _share(ours)


def _share(tally: Tally) -> float:
    return tally.cached / tally.in_blocks


def _prompts(sequences: Sequence[Json], turns: Sequence[Json]) -> dict[int, list[Int32]]:
    ids = {row["rollout_id"]: np.array(row["token_ids"], np.int32) for row in sequences}
    prompts: dict[int, list[Int32]] = {rollout: [] for rollout in ids}
    for turn in turns:
        prompts[turn["rollout_id"]].append(ids[turn["rollout_id"]][: turn["prompt_tokens"]])
    return prompts


def _tally(turns: Sequence[Json]) -> Tally:
    lengths: dict[int, int] = {}
    repeated = in_blocks = cached = 0
    for turn in turns:
        before = lengths.get(turn["rollout_id"], 0)
        repeated, in_blocks = repeated + before, in_blocks + before // BLOCK * BLOCK
        cached += turn["cached_tokens"] if before else 0
        lengths[turn["rollout_id"]] = turn["prompt_tokens"] + turn["completion_tokens"]
    return Tally(repeated, in_blocks, cached)


async def _replay(
    pool: Sequence[Server], prompts: dict[int, list[Int32]], *, at_random: bool
) -> Tally:
    """The same prompts to servers with empty caches, one token each."""
    urls = [f"http://127.0.0.1:{server.port}" for server in pool]
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.post(f"{url}/reset_prefix_cache") as answer:
                assert answer.status == 200
    backends = [VllmBackend(url, RENDERER.vocab_size) for url in urls]
    draws = random.Random(1)

    async def replay_rollout(rollout: int) -> list[Json]:
        measured_turns: list[Json] = []
        for prompt in prompts[rollout]:
            place = draws.randrange(len(backends)) if at_random else rollout % len(backends)
            completion = await first_token(backends[place], prompt)
            measured_turns.append(
                {
                    "rollout_id": rollout,
                    "prompt_tokens": len(prompt),
                    "completion_tokens": 1,
                    "cached_tokens": completion.cached_tokens,
                }
            )
        return measured_turns

    try:
        turns = await asyncio.gather(*map(replay_rollout, prompts))
    finally:
        for backend in backends:
            await backend.close()
    return _tally([turn for each in turns for turn in each])
