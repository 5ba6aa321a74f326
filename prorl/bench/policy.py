"""`prorl bench policy`: sampled tokens a second of the embedded backend.

The rival is `transformers.generate` on the same checkpoint.

The backend runs as the process that the service uses and is asked over HTTP, as RUN does;
transformers runs in a process of its own, without HTTP, on one batch of equal prompts. Both have
one thread and float32, sample at temperature 1 and stop at no token. Rounds alternate, so that a
busy neighbour meets both; medians are reported. Nothing here is a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from prorl.backends.embedded import TOY
from prorl.backends.vllm import VllmBackend
from prorl.bench.children import python
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report, median
from prorl.linux import procfs
from prorl.types import Completion, GenerateRequest, Json, SamplingParams

REQUESTS = (1, 8, 32, 64)
PROMPT_TOKENS, SAMPLED_TOKENS = 48, 128
RIVAL = "prorl.bench.policy_rival"
RIVAL_NAME = "transformers.generate"
READY_S, ANSWER_S = 120.0, 300.0


class Round(NamedTuple):
    """What one batch of requests took."""

    seconds: float
    cpu_s: float


class Child:
    """A process that answers JSON lines, or serves; its CPU time comes from /proc."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self, timeout_s: float) -> Json:
        """The process's next line, without what stands before the first brace."""
        assert self._process.stdout is not None
        text = (await asyncio.wait_for(self._process.stdout.readline(), timeout_s)).decode()
        if "{" not in text:
            raise RuntimeError(f"the process ended: {text!r}")
        return json.loads(text[text.index("{") :])

    async def ask(self, question: Json) -> Json:
        """Send a line, wait for a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.line(ANSWER_S)

    def cpu_s(self) -> float:
        """User and system time so far."""
        return procfs.cpu_s(self._process.pid)


@asynccontextmanager
async def child(module: str, *args: str) -> AsyncIterator[Child]:
    """A process with one BLAS and one torch thread; killed at the end."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "VLLM_API_KEY": "",
    }
    async with python("-m", module, *args, env=environment) as process:
        yield Child(process)


async def run(quick: bool) -> Report:
    """Measure all rows; quick takes about 30 s."""
    return Report(bench="policy", machine=machine(), rows=tuple(await measure(quick)))


async def measure(quick: bool) -> list[Figure]:
    """The rows: `tokens_per_s_N` for N requests at a time, and `logprob_gap_max`."""
    rounds = 3 if quick else 9
    async with child("prorl.backends.embedded", "--model", str(TOY)) as server:
        ready = await server.line(READY_S)
        backend = VllmBackend(ready["url"], vocab_size=1 << 30)
        try:
            async with child(RIVAL, str(TOY)) as rival:
                problem = (await rival.line(READY_S)).get("problem", "")
                return await _measure(server, backend, None if problem else rival, problem, rounds)
        finally:
            await backend.close()


async def _measure(
    server: Child, backend: VllmBackend, rival: Child | None, problem: str, rounds: int
) -> list[Figure]:
    rows, gaps = [], []
    for count in REQUESTS:
        ours, theirs = [], []
        for index in range(rounds + 1):  # the first round warms caches up and is left out
            measured, completions = await _sample(server, backend, count, index)
            ours.append(measured)
            if rival is not None:
                theirs.append(await _rival_round(rival, count))
        if rival is not None:
            gaps.append(await _gap(rival, completions[0], index))
        rows.append(_row(count, ours[1:], theirs[1:], problem))
    return [*rows, _gap_row(max(gaps, default=0.0), problem)]


def _gap_row(gap: float, problem: str) -> Figure:
    return Figure(
        what="logprob_gap_max",
        value=gap,
        unit="nats",
        rival="transformers forward",
        note=problem or "bar 1e-4",
    )


async def _sample(
    server: Child, backend: VllmBackend, count: int, index: int
) -> tuple[Round, list[Completion]]:
    began, cpu = time.perf_counter(), server.cpu_s()
    completions = await asyncio.gather(
        *(backend.generate(_request(index, place)) for place in range(count))
    )
    return Round(time.perf_counter() - began, server.cpu_s() - cpu), completions


def _request(index: int, place: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=_prompt(index, place),
        sampling=SamplingParams(max_tokens=SAMPLED_TOKENS),
        seed=place,
        stop_token_ids=(),
        request_id=f"bench/{index}/{place}",
        session=f"{index}/{place}",
    )


def _prompt(index: int, place: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Different in every round and request, so that no prefix is known."""
    return np.random.default_rng((index, place)).integers(
        0, 256, size=PROMPT_TOKENS, dtype=np.int32
    )


async def _rival_round(rival: Child, count: int) -> Round:
    answer = await rival.ask(
        {
            "generate": [_prompt(0, place).tolist() for place in range(count)],
            "max_new_tokens": SAMPLED_TOKENS,
        }
    )
    return Round(answer["seconds"], answer["cpu_s"])


async def _gap(rival: Child, completion: Completion, index: int) -> float:
    """Largest difference between a completion's logprobs and those of a forward pass."""
    ids = np.concatenate([_prompt(index, 0), completion.token_ids_C])
    answer = await rival.ask({"score": ids.tolist()})
    return float(
        np.abs(np.array(answer["logprobs"][PROMPT_TOKENS - 1 :]) - completion.logprobs_C).max()
    )


def _row(count: int, ours: list[Round], theirs: list[Round], problem: str) -> Figure:
    tokens, cpu_s = count * SAMPLED_TOKENS, statistics.median(one.cpu_s for one in ours)
    command = f"python -m {RIVAL} {TOY.name} # {count} prompts in one batch"
    note = problem or f"{tokens / max(cpu_s, 1e-9):,.0f} tokens per CPU second"
    rates = [tokens / one.seconds for one in ours]
    row = median(f"tokens_per_s_{count}", rates, "tokens/s", cpu_s=cpu_s, note=note)
    if not theirs:
        return replace(row, rival=RIVAL_NAME, rival_command=command)
    their_cpu = f", rival {tokens / statistics.median(one.cpu_s for one in theirs):,.0f}"
    row = replace(row, note=problem or note + their_cpu)
    rival = statistics.median(tokens / one.seconds for one in theirs)
    return row.beside(RIVAL_NAME, rival, command, more_is_better=True)
