"""The worker dies, by SIGKILL, at any moment of trials of the real Harbor: nothing of them stays,
and each goes on as attempt + 1 (`make test-adapters`; PRORL_HARBOR_KILLS says how often).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest

from prorl.client.client import Client
from prorl.deploy.running import client_of, service, signals
from prorl.linux.procfs import descendants, pids
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.agents.test_harbor_guest import AGENTS, TOML, pytestmark, rows
from tests.harbor_folders import make_folder
from tests.integration.run_checks import check_complete, check_no_leftovers
from tests.integration.run_checks import rows as query
from tests.integration.services import APART, settings, slots
from tests.waiting import until

KILLS = int(os.environ.get("PRORL_HARBOR_KILLS", "3"))
pytestmark = [mark for mark in pytestmark if mark.name != "timeout"]
pytestmark += [pytest.mark.faults, pytest.mark.timeout(3600 + 240 * KILLS)]

TRIALS = 2
NAMES = ("mini-swe-agent", "terminus-2")
PATIENCE_S = 1200.0
MOMENTS = ("task.json", "work/root/*", "work/root/*/logs/agent/*", "work/root/*/logs/verifier/*")
"""What is in a trial's folder when the worker dies: nothing but imports have begun, then there is
the environment, then the agent and the verifier have written.
"""


def folders(tasks: Path) -> set[Path]:
    """Folders of guests whose task is below a folder, each with what its environment holds."""
    trials = set()
    for path in Path(tempfile.gettempdir()).glob("prorl-guest-*"):
        with suppress(OSError):
            if str(tasks) in (path / "task.json").read_text():
                trials.add(path)
    return trials


def processes(of: set[Path]) -> set[int]:
    """Processes that work in one of these folders, are locked up there, or name it."""
    names = tuple(path.name for path in of)
    members = set()
    for pid in pids():
        with suppress(OSError):
            places = [os.readlink(f"/proc/{pid}/{link}") for link in ("cwd", "root")]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
            if any(name in text for text in (*places, words) for name in names):
                members.add(pid)
    return members


def attempts(root: Path) -> dict[int, tuple[str, int]]:
    """State and attempt of each rollout in the control log."""
    with closing(sqlite3.connect(root / "control.db", timeout=30)) as log:
        listing = log.execute("SELECT rollout_id, state, attempt FROM rollouts").fetchall()
    return {rollout: (state, attempt) for rollout, state, attempt in listing}


def in_hand(root: Path) -> dict[int, int]:
    """The attempt of each rollout that runs."""
    return {key: number for key, (state, number) in attempts(root).items() if state == "running"}


async def test_a_killed_worker_leaves_nothing_of_a_trial_and_its_next_attempt_begins(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path / "task", **{"task.toml": TOML})
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"

    def tasks(first: int, count: int) -> list[Task]:
        names = [
            ("terminus-2", "mini-swe-agent")[number % 2] for number in range(first, first + count)
        ]
        return [
            Task(
                task_id=f"{name}/{first + offset}",
                env="guest",
                prompt="",
                data=rows(tmp_path, AGENTS[name]),
            )
            for offset, name in enumerate(names)
        ]

    layout = {**slots(4), **APART, "run": {"slots": TRIALS}}
    config = settings(root, "local", "scripted:noop?delay_s=1", load_code=True, **layout)
    total, later, struck = 0, 0, 0

    async def submit(client: Client, *, last: bool = False) -> None:
        nonlocal total
        batch, key = tasks(total, TRIALS), f"k{total}"
        await asyncio.to_thread(client.submit, "r", batch, 1, key=key, last=last)
        total += TRIALS

    async def strike(running: Supervisor, number: int) -> None:
        nonlocal later, struck
        child = running.children["worker-0"]
        await until(lambda: folders(tmp_path), "a trial has begun", PATIENCE_S)
        begun, moment = folders(tmp_path), MOMENTS[number % len(MOMENTS)]

        def has_come() -> bool:
            """A trial that ends before it was seen there is over."""
            return not begun & folders(tmp_path) or any(any(path.glob(moment)) for path in begun)

        await until(has_come, f"a trial has {moment}", PATIENCE_S)
        starts, trials, hit = child.starts, folders(tmp_path), in_hand(root)
        struck += len(processes(trials))
        child.signal(signal.SIGKILL)
        running.note_commits(number + 1)  # or it takes deaths without commits for a crash loop

        def is_over() -> bool:
            return not (folders(tmp_path) & trials) and not processes(trials)

        def goes_on() -> bool:
            now = attempts(root)
            moved = [now[key][0] == "completed" or now[key][1] > hit[key] for key in hit]
            return child.starts > starts and all(moved)

        await until(is_over, "nothing of its trials is left", PATIENCE_S)
        await until(goes_on, "each of its rollouts goes on, or was stored", PATIENCE_S)
        now = attempts(root)
        assert all(now[key][1] <= hit[key] + 1 for key in hit)
        later += sum(now[key][1] == hit[key] + 1 for key in hit)

    async with signals() as stop, service(config, stop) as running:
        assert isinstance(running, Supervisor)
        client = client_of(running, PATIENCE_S)
        limits = {"max_turns": 3, "max_worker_losses": 2 * KILLS, "max_attempts": 2 * KILLS}
        # twice: on a busy machine the supervisor ends a worker whose imports are silent for long
        await asyncio.to_thread(client.create_run, run_id="r", limits=limits)
        for number in range(KILLS):
            if all(state == "completed" for state, _ in attempts(root).values()):
                await submit(client)
            await strike(running, number)
        await submit(client, last=True)

        def is_complete() -> bool:
            states = [state for state, _ in attempts(root).values()]
            return states == ["completed"] * total

        await until(is_complete, "all are completed", PATIENCE_S)
        assert running.restarts >= KILLS
    check_no_leftovers(root, before)
    assert not folders(tmp_path)
    stored = check_complete(root / "r", total)
    print(f"{KILLS} kills, {struck} processes of trials, {later} attempts went on")
    assert later > 0
    listing = "select distinct split_part(task_id, '/', 1) as agent, reward from rollouts"
    agents = {row["agent"]: row["reward"] for row in query(stored, listing)}
    assert agents == dict.fromkeys(NAMES, 0.0), "the policy's turns end before it has written"
    (again,) = query(stored, "select sum(attempt - 1)::int as num from rollouts")
    assert again["num"] >= later
