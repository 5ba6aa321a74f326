"""What the journal of turns costs: CPU and bytes a turn, a whole rollout, reading it back.

Also what it would cost to wait for the disk after each record.

A turn is a model call of 300 sampled ids behind 500 ids of context, and a tool call of 1,000 bytes.
The rival is what no journal can beat: the same bytes appended to one open file, unsealed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prorl.bench.children import disk
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.columns import Lease, leased_batch, ready_columns
from prorl.journal import Answer, Ended, Journals, Said
from prorl.rows import Row, grow
from prorl.types import (
    AttemptKey,
    Completion,
    FailureCode,
    FinishReason,
    Message,
    PolicyVersion,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    StopReason,
    Task,
    ToolSpec,
)

TURNS = 8
CONTEXT, SAMPLED, OUTPUT = 500, 300, 1000
RIVAL = "the same bytes by os.write, unsealed"
ANSWER = Answer(turn=0, index=0, text="x" * OUTPUT, tool_s=0.1)
ENDED = Ended(stop=StopReason.DONE, code=FailureCode.NONE, message="", artefact=b"42")


class Cost(NamedTuple):
    """What one repetition cost."""

    cpu_us: float
    wall_us: float


async def run(quick: bool) -> Report:
    """Measure; `quick` takes about five seconds."""
    count = 200 if quick else 1000
    with tempfile.TemporaryDirectory(prefix="prorl-journal-", dir=disk()) as folder:
        return Report(bench="journal", machine=machine(), rows=_rows(Path(folder), count))


def _rows(folder: Path, count: int) -> tuple[Figure, ...]:
    journals = Journals(folder / "run-0")
    journals.open()
    for number in range(count):
        _row(number)
    empty = _cost(count, lambda number: _rollout(journals, number, 0))
    whole = _cost(count, lambda number: _rollout(journals, number, TURNS))
    begun = _keep(journals, 0, TURNS)
    bytes_a_turn = (begun - _keep(journals, 1, 0)) / TURNS
    journals.close()
    read = _cost(10, lambda _: _recover(folder / "run-0"))
    bare = _bare(folder / "bare", int(bytes_a_turn), count, sync=False)
    synced = _bare(folder / "bare", int(bytes_a_turn), count, sync=True)
    return (
        _per_turn((whole.cpu_us - empty.cpu_us) / TURNS, bare.cpu_us),
        _bytes(bytes_a_turn),
        _per_rollout(whole.cpu_us, empty.cpu_us),
        Figure(what="journal_recover_us_per_rollout", value=read.wall_us / 2, unit="us"),
        _synced(2 * synced.wall_us),
    )


def _per_turn(cpu_us: float, bare_us: float) -> Figure:
    note = f"{CONTEXT} ids of context, {SAMPLED} sampled, a call of {OUTPUT} bytes"
    row = Figure(what="journal_cpu_us_per_turn", value=cpu_us, unit="us", note=note)
    return row.beside(RIVAL, bare_us)


def _bytes(a_turn: float) -> Figure:
    least = 4.0 * (CONTEXT + 2 * SAMPLED) + OUTPUT
    row = Figure(what="journal_bytes_per_turn", value=a_turn, unit="bytes")
    return row.beside("ids, logprobs and text alone", least)


def _per_rollout(cpu_us: float, empty_us: float) -> Figure:
    note = f"{TURNS} turns, row, end, file made and removed; {empty_us:.0f} with no turn"
    return Figure(what="journal_cpu_us_per_rollout", value=cpu_us, unit="us", note=note)


def _synced(wall_us: float) -> Figure:
    note = "not paid: what surviving a power cut would add, one wait a record"
    return Figure(what="journal_fdatasync_us_per_turn", value=wall_us, unit="us", note=note)


def _cost(count: int, work: Callable[[int], object]) -> Cost:
    """Medians of five, microseconds a repetition."""
    costs = []
    for _ in range(5):
        cpu, wall = time.process_time(), time.perf_counter()
        for number in range(count):
            work(number)
        costs.append(((time.process_time() - cpu), (time.perf_counter() - wall)))
    cpus, walls = (sorted(cost[i] for cost in costs) for i in range(2))
    return Cost(cpus[2] / count * 1e6, walls[2] / count * 1e6)


def _rollout(journals: Journals, number: int, turns: int) -> None:
    _keep(journals, number, turns)
    journals.drop(AttemptKey("bench", number, 1))


def _keep(journals: Journals, number: int, turns: int) -> int:
    """A rollout's journal from its row to its end; bytes written."""
    before = journals.num_bytes
    journals.expect(_row(number))
    journals.settle()
    journal = journals.attempt(AttemptKey("bench", number, 1), on_unknown="tell")
    for turn in range(turns):
        journal.say(replace(SAID, turn=turn))
        journal.tell(replace(ANSWER, turn=turn))
    journal.end(ENDED)
    return journals.num_bytes - before


def _recover(folder: Path) -> None:
    journals = Journals(folder)
    assert len(journals.open()) == 2
    journals.close()


def _bare(path: Path, size: int, count: int, sync: bool) -> Cost:
    data = b"x" * size
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(_: int) -> None:
        os.write(fd, data)
        if sync:
            os.fdatasync(fd)

    try:
        return _cost(min(count, 50) if sync else count, write)
    finally:
        os.close(fd)


@cache
def _row(number: int) -> Row:
    """A READY row; made once, since that is INIT's work."""
    lease = Lease(
        key=AttemptKey("bench", number, 1),
        group_id=number,
        sample_index=0,
        rollout_key=f"bench/{number}/0",
        task=Task(task_id=f"t/{number}", env="math", prompt="x" * 500, data={"answer": "42"}),
        agent="native",
        sampling=SamplingParams(),
        limits=RolloutLimits(),
        backend="scripted:oracle",
        on_unknown="tell",
    )
    added = ready_columns(
        sandbox=SandboxRef(node_id="local", sandbox_id="s", socket_path="/s"),
        prompt=(Message(role="user", content="x" * 500),),
        tools=(ToolSpec("python", "Runs Python.", {"type": "object"}),),
        init_s=0.1,
    )
    return Row(grow([Row(leased_batch([lease]), 0)], [added]), 0)


SAID = Said(
    turn=0,
    segment=0,
    context_ids=np.arange(CONTEXT, dtype=np.int32),
    completion=Completion(
        token_ids_C=np.arange(SAMPLED, dtype=np.int32),
        logprobs_C=np.full(SAMPLED, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        version_ends=(SAMPLED,),
        versions=(PolicyVersion(0),),
        backend="scripted:oracle",
    ),
    temperature=1.0,
    llm_s=0.1,
)
