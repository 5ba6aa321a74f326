"""A rollout outlives its worker: RUN is killed again and again while it holds multi-turn rollouts.

The checks read the marks of the calls (`counting_env.py`), the journals themselves, the stored run,
and an undisturbed run with the same seed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl.backends.embedded import TOY
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.journal import AttemptEnd, RecordedCall, ToolAnswer
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.supervisor.service import Supervisor
from prorl.tasks.generated import generate
from prorl.types import AttemptKey, Task
from tests.envs import guessing_env
from tests.integration.counting_env import turn_text
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.integration.services import settings, slots, struck, view
from tests.journal.journal_records import look
from tests.waiting import until

TURNS = 6
SLOTS = 6
ENV = str(Path(__file__).with_name("counting_env.py")) + ":Counting"
GUESSING = f"{guessing_env.__file__}:Silent"
POLICY = "scripted:oracle?delay_s=0.1"
PATIENCE_S = 240.0
"""Struck again the moment that it is back, `service` may be away at each try of 20 s."""
KILLS = int(os.environ.get("PRORL_KILLS", "20"))
"""Kills of RUN; `make test-kills` makes them a hundred."""


class Loss(NamedTuple):
    """Trajectory-seconds that one kill costs: the work since each attempt's last record, and what
    the attempts in hand had done since they came or the kill before, which is lost without a
    journal.
    """

    kept: float
    bare: float


class Trial(NamedTuple):
    """The run and the process of it that is killed."""

    root: Path
    sandbox_kind: str
    backend: str
    tasks: Callable[[int, int], list[Task]]
    """By the first one's number and how many."""
    kills: int = 0
    at_least: int = 2 * SLOTS
    """Rollouts."""
    workers: int = 1
    """0: RUN dies with gateway and store."""
    journal_sync: bool = False
    after_answer: bool = False
    """Whether a kill waits until a tool or an env has answered in some attempt in hand."""

    def config(self) -> ServiceConfig:
        """Returns the configuration of its service."""
        more = {"load_code": True, "journal_sync": self.journal_sync, "tokenizer": str(TOY)}
        return settings(
            self.root, self.sandbox_kind, self.backend, **slots(SLOTS), workers=self.workers, **more
        )

    @property
    def victim(self) -> str:
        return "worker-0" if self.workers else "service"


def _counting(first: int, count: int) -> list[Task]:
    data = {"turns": TURNS, "pause": 0.05}
    return [
        Task(task_id=f"count/{number}", env=ENV, prompt=f"Count {number}.", data=data)
        for number in range(first, first + count)
    ]


def _guessing(first: int, count: int) -> list[Task]:
    data = {"number": 7, "pause": 0.3}
    return [
        Task(task_id=f"guess/{number}", env=GUESSING, prompt="Which number?", data=data)
        for number in range(first, first + count)
    ]


def _shopping(first: int, count: int) -> list[Task]:
    return generate("shop", n=first + count)[first:]


class _Watch:
    """Looks into the folder of RUN's journals."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "journal" / "run-0"
        self._seen: dict[AttemptKey, float] = {}
        self._killed_at = 0.0
        self.twice: list[str] = []
        self.struck: set[AttemptKey] = set()
        """Attempts that RUN had when it was killed."""
        self.answers: dict[tuple[int, int], str] = {}
        """What tools and envs had said by then, by rollout and turn."""

    def paths(self) -> list[Path]:
        """Returns the journals of attempts in hand."""
        snapshots = {path: look(path) for path in sorted(self._folder.glob("*.journal"))}
        keys = [snapshot.key for snapshot in snapshots.values() if snapshot is not None]
        now = time.time()
        self._seen = {key: self._seen.get(key, now) for key in keys}
        return [path for path, snapshot in snapshots.items() if snapshot is not None]

    def loss(self) -> Loss:
        """Returns the loss of a kill now, and asserts that no turn was sampled and no call answered
        twice.
        """
        now, kept, bare = time.time(), 0.0, 0.0
        for path in self.paths():
            snapshot = look(path)
            if snapshot is not None:
                self.struck.add(snapshot.key)
                self.answers |= {
                    (snapshot.key.rollout_id, record.turn): record.text
                    for record in snapshot.records
                    if isinstance(record, ToolAnswer) and record.text is not None
                }
            if snapshot is None or any(
                isinstance(record, AttemptEnd) for record in snapshot.records
            ):
                continue  # all that is left of it is in the journal
            at = path.stat().st_mtime
            # Who goes on writes that first: before it nothing was done since the kill before.
            kept += now - at if at > self._killed_at else 0.0
            bare += now - max(self._seen[snapshot.key], self._killed_at)
            counts = Counter(
                (type(record).__name__, record.turn, getattr(record, "index", 0))
                for record in snapshot.records
                if isinstance(record, RecordedCall | ToolAnswer)
            )
            self.twice += [f"{path.name} {what}" for what, times in counts.items() if times > 1]
        self._killed_at = now
        return Loss(kept, bare)


def has_answer(paths: list[Path]) -> bool:
    """Returns whether a journal holds what a tool or an env said."""
    attempts = filter(None, map(look, paths))
    return any(isinstance(r, ToolAnswer) for attempt in attempts for r in attempt.records)


async def _kill(running: Supervisor, client: Client, watch: _Watch, trial: Trial) -> list[Loss]:
    child, losses = running.children[trial.victim], list[Loss]()
    for number in range(trial.kills):

        async def busy() -> bool:
            paths = watch.paths()
            return len(paths) >= SLOTS // 2 and (not trial.after_answer or has_answer(paths))

        await until(busy, "RUN holds rollouts")
        await asyncio.sleep(0.037 * (number % 7))
        starts, commits = child.starts, int((await view(client))["commits"])
        child.signal(signal.SIGKILL)
        losses.append(watch.loss())

        async def back(starts: int = starts, commits: int = commits) -> bool:
            moved = int((await view(client))["commits"]) > commits
            return child.starts > starts and child.beats and moved

        await until(back, "RUN is back and something was committed")
    return losses


async def _run(trial: Trial) -> tuple[int, list[Loss], StoredRun, _Watch]:
    before = set(descendants(os.getpid()))
    watch = _Watch(trial.root)
    async with signals() as stop, service(trial.config(), stop) as running:
        assert isinstance(running, Supervisor)
        client = client_of(running, PATIENCE_S)
        limits = {"max_turns": TURNS + 1}
        await asyncio.to_thread(client.create_run, run_id="r", limits=limits, seed=5)
        kills = _kill(running, client, watch, trial)
        total, losses = await struck(running, client, kills, trial.tasks, 2 * SLOTS, trial.at_least)
        assert running.restarts == trial.kills
        assert watch.paths() == [], "a journal outlived its rollout's commit"
    check_no_leftovers(trial.root, before)
    return total, losses, check_complete(trial.root / "r", total), watch


def _check_attempts(root: Path, stored: StoredRun, watch: _Watch) -> None:
    """Asserts that the attempts that RUN had at a kill ended in the attempt that they were in, and
    nothing was charged. What only INIT had begins again.
    """
    ended = {row["rollout_id"]: row["attempt"] for row in rows(stored, ATTEMPTS)}
    assert watch.struck
    assert [key for key in watch.struck if ended[key.rollout_id] != key.attempt] == []
    charged = "SELECT * FROM rollouts WHERE worker_losses > 0 OR infra_failures > 0"
    with closing(sqlite3.connect(root / "control.db")) as control:
        assert list(control.execute(charged)) == []


ATTEMPTS = "select rollout_id, attempt from rollouts"
OUTPUTS = "select rollout_id, turn, content from messages where role = 'tool' order by 1, 2"
IDS = (
    "select r.rollout_key, s.segment, s.token_ids, s.logprobs, s.span_end, s.span_kind,"
    " s.span_version, s.span_turn, s.span_temperature, s.reward, r.stop_reason, r.num_turns"
    " from sequences s join rollouts r using (rollout_id) where {which}"
    " order by 1, 2"
)
HISTORY = "select sum(resumes)::int as n from rollouts"


@pytest.mark.faults
@pytest.mark.timeout(600 + 20 * KILLS)
@pytest.mark.parametrize("workers", [0, 1], ids=["together", "workers"])
async def test_run_killed_again_and_again_costs_no_attempt_no_turn_and_no_call(
    tmp_path: Path, sandbox_kind: str, workers: int
) -> None:
    trial = Trial(tmp_path / "killed", sandbox_kind, POLICY, _counting, KILLS, workers=workers)
    total, losses, stored, watch = await _run(trial)
    assert watch.twice == []
    _check_attempts(trial.root, stored, watch)
    assert rows(stored, "select status, reward, count(*) as n from rollouts group by all") == [
        {"status": "completed", "reward": 1.0, "n": total}
    ]
    for row in rows(stored, OUTPUTS):
        assert row["content"] == turn_text(row["turn"]), row
    (history,) = rows(stored, HISTORY)
    assert history["n"] >= KILLS, "some kills met no rollout"
    _, _, calm, _ = await _run(trial._replace(root=tmp_path / "calm", kills=0))
    ids = IDS.format(which=f"r.rollout_id < {2 * SLOTS}")
    assert rows(stored, ids) == rows(calm, ids)
    kept, bare = ([loss[i] for loss in losses] for i in range(2))
    print(
        f"\n{KILLS} kills, {total} rollouts of {TURNS} turns, resumed {history['n']} times;"
        f" trajectory-seconds lost a kill, median / max: journal"
        f" {statistics.median(kept):.2f} / {max(kept):.2f}, without"
        f" {statistics.median(bare):.2f} / {max(bare):.2f}"
    )


@pytest.mark.faults
@pytest.mark.timeout(600)
async def test_a_resumed_rollout_has_the_ids_of_an_undisturbed_rollout(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Real sampling with seeds, at temperature 1; a batch of other size moves logprobs by 1e-5."""
    trial = Trial(tmp_path / "killed", sandbox_kind, f"embedded:{TOY}", _shopping, 4, 8 * SLOTS)
    total, _, stored, watch = await _run(trial)
    assert watch.twice == []
    _check_attempts(trial.root, stored, watch)
    assert rows(stored, "select status, count(*) as n from rollouts group by all") == [
        {"status": "completed", "n": total}
    ]
    _, _, calm, _ = await _run(trial._replace(root=tmp_path / "calm", kills=0))
    # a later attempt has seeds of its own
    first = f"rollout_id < {8 * SLOTS} and attempt = 1"
    numbers = [row["rollout_id"] for row in rows(stored, f"{ATTEMPTS} where {first}")]
    ids = IDS.format(which=f"r.rollout_id in {tuple(numbers)}")
    ours, theirs = rows(stored, ids), rows(calm, ids)
    for our_row, other in zip(ours, theirs, strict=True):
        assert our_row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert our_row == other
    (history,) = rows(stored, f"{HISTORY} where {first}")
    assert history["n"] > 0, "no kill met a rollout that is compared"
    print(f"\n{len(ours)} sequences compared, their rollouts resumed {history['n']} times")


@pytest.mark.faults
@pytest.mark.timeout(600)
async def test_run_dies_with_the_gateway_and_goes_on(tmp_path: Path, sandbox_kind: str) -> None:
    """With journals on the disk the gateway waits for RUN at its start, as after a power cut.

    Leases that it had granted and not sent begin again.
    """
    trial = Trial(
        tmp_path / "killed", sandbox_kind, POLICY, _counting, 3, workers=0, journal_sync=True
    )
    total, _, stored, watch = await _run(trial)
    assert watch.twice == []
    _check_attempts(trial.root, stored, watch)
    assert rows(stored, "select reward, count(*) as n from rollouts group by all") == [
        {"reward": 1.0, "n": total}
    ]
    assert rows(stored, HISTORY)[0]["n"] >= SLOTS


@pytest.mark.faults
@pytest.mark.timeout(600)
async def test_an_env_with_turns_goes_on_from_the_state_that_it_was_in(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """It draws a number in each of its turns: what it had said before the kill stays said."""
    folder = tmp_path / "killed"
    trial = Trial(folder, sandbox_kind, POLICY, _guessing, 4, 4 * SLOTS, after_answer=True)
    total, _, stored, watch = await _run(trial)
    assert watch.twice == []
    _check_attempts(trial.root, stored, watch)
    counts = "select status, reward, env_state, count(*) as n from rollouts group by all"
    assert rows(stored, counts) == [
        {"status": "completed", "reward": 0.5, "env_state": '{"wrong":1}', "n": total}
    ]
    messages = "select rollout_id, turn - 1 as turn, content from messages where role = 'user'"
    responses = {(row["rollout_id"], row["turn"]): row["content"] for row in rows(stored, messages)}
    assert watch.answers, "no kill met an env that had spoken"
    assert {place: responses[place] for place in watch.answers} == watch.answers
