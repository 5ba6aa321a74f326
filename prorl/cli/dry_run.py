"""The checks of `prorl run --dry-run` beyond those of planning a job: everything that a run needs
from elsewhere, without starting anything.

    tasks read and checked, agent, settings    `JobPlan.make`, before
    filter       its SQL binds
    renderer     what is proved of the model's template
    servers      well, logprobs of what they sample, the run's vocabulary and context
    slots        how many rollouts their KV caches hold
    images       those that tasks name: here, or pulled by the first task
    memory       of one sampler and one trainer, by arithmetic

Whatever is wrong is raised as the run would raise it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from prorl.backends.catalogue import is_server
from prorl.cli.job import JobPlan
from prorl.cli.output import say, table
from prorl.pluralize import pluralize
from prorl.types import DOCKER, Json, image_name

GIB = 1 << 30


async def dry_run(plan: JobPlan) -> int:
    """Look at everything, say it as a table. Raises ConfigError, NotFoundError, BackendError."""
    from prorl.renderer.check import check
    from prorl.service.submissions import check_run_offer
    from prorl.storage.serve.filter import check_filter

    check_filter(plan.run.filter)
    spec = plan.run.renderer.settled(plan.service.tokenizer, 0.0)
    proved = await check(spec)
    check_run_offer(plan.run, proved)
    rows = [
        *(("tasks", line) for line in plan.about),
        (
            "rollouts",
            f"{pluralize(len(plan.tasks), 'task')}, {pluralize(plan.num_rollouts, 'rollout')}",
        ),
        ("filter", plan.run.filter.partition("\n")[0]),
        ("renderer", _renderer(spec.model, proved)),
        *[("server", line) for line in await _servers(plan, proved)],
        *[("slots", line) for line in await _slots(plan)],
        *(("images", line) for line in _images(plan)),
        *(("memory", line) for line in _memory(Path(spec.model), plan)),
    ]
    table(("checked", "result"), rows)
    say(f"nothing was started; without --dry-run this is run {plan.run.run_id}")
    return 0


def _renderer(model: str, proved: Mapping[str, Json]) -> str:
    differs = [f"{kind}: {how}" for kind, how in proved.get("proof", {}).items() if how != "exact"]
    family = proved.get("family", proved["renderer"])
    return f"{model}: {family}, {proved['vocab_size']} ids" + "".join(
        f"; {difference}" for difference in differs
    )


async def _servers(plan: JobPlan, proved: Mapping[str, Json]) -> list[str]:
    from prorl.cli.run_job import ask_servers
    from prorl.service.pool.servers import Servers, vocabulary_of

    await ask_servers(plan.service)
    servers, lines = Servers(plan.service, lambda name: True), []
    for name in plan.service.backends:
        facts: dict[str, Json] = {}
        if is_server(name):
            vocabulary = vocabulary_of(plan.run, proved)
            facts = await servers.check_vocabulary(name, vocabulary, ours=True)
        lines.append(" ".join((name, *(f"{key}={value}" for key, value in facts.items()))))
    return lines


async def _slots(plan: JobPlan) -> list[str]:
    """Returns the lines that say how many rollouts fill the servers of a vLLM."""
    from prorl.cli.server_size import read_cache_tokens, size_lines

    longest, run = plan.run.limits.max_tokens, plan.run
    groups = run.max_open_groups * plan.job.num_samples
    names = list(filter(is_server, plan.service.backends))
    lines: list[str] = []
    for name in names:
        tokens = await read_cache_tokens(name, plan.service.backend_key)
        slots = plan.service.run.slots // len(names)
        lines += size_lines(name, tokens, longest, slots, groups // len(names))
    return lines


def _images(plan: JobPlan) -> Iterator[str]:
    from prorl.sandbox.images.registry import Registry, default_root

    registry = Registry(plan.service.sandbox.images or default_root())
    named = {str(task.data["image"]) for task in plan.tasks if task.data.get("image")}
    here, absent = 0, set()
    for image in named:
        if image.startswith(DOCKER):
            absent |= {image} - {image for name in registry.names() if name == image_name(image)}
        elif not Path(image).is_absolute():
            registry.find(image)
        here += image not in absent
    if named:
        yield f"{here} of {len(named)} are here" + (
            f"; `prorl image pull --rows {plan.job.tasks}` brings {len(absent)}" if absent else ""
        )


def _memory(model: Path, plan: JobPlan) -> Iterator[str]:
    """Yields the memory that weights need by the headers of their files, and a rollout's keys and
    values by its config.
    """
    files = sorted(model.glob("*.safetensors"))
    if not files:
        yield f"{model} has no safetensors: not known"
        return
    config = orjson.loads((model / "config.json").read_bytes())
    config = config.get("text_config") or config
    count = sum(map(num_parameters, files))
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 4 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head
    longest = plan.run.limits.max_tokens
    yield (
        f"sampler: {count / 1e9:.3g} B parameters, {2 * count / GIB:.3g} GiB in bfloat16, and"
        f" {per_token * longest / GIB:.3g} GiB of keys and values for a rollout of {longest}"
    )
    yield (
        f"trainer: {16 * count / GIB:.3g} GiB of float32 weights, gradients and AdamW; a KL"
        f" reference {4 * count / GIB:.3g} more"
    )


def num_parameters(file: Path) -> int:
    """Returns the number of parameters in a safetensors file, by its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = orjson.loads(opened.read(length))
    return sum(
        math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    )
