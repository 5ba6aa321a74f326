"""SIGKILL of each kind of process, ten times each, and SIGSTOP, while it holds work: nothing lost,
nothing twice, nothing left behind. A frozen process is ended by the supervisor.

Work is submitted as long as there are kills to come, so that every kill meets a busy process.
Checked by SQL over the stored run and by `verify`, not by counters.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.linux.procfs import descendants, start_ticks
from prorl.sandbox.host import UnixSandboxHost
from prorl.supervisor.service import Supervisor
from prorl.types import Json, Task
from tests.agents.test_program import LOOP
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.integration.services import APART, settings, slots, struck, view
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("PRORL_ENDPOINT_KILLS", "10"))
FREEZES = 2
WAVE = 12
POLICY = "scripted:oracle?delay_s=0.15"
LIMITS = {"max_attempts": 40, "max_worker_losses": 40}
PATIENCE_S = 240.0


def _tasks(first: int, count: int) -> list[Task]:
    """Sums with a Python tool in a sandbox."""

    def task(number: int) -> Task:
        answer = number + 7
        data = {"answer": str(answer), "solution": f"<<{number}+7={answer}>>\n#### {answer}"}
        prompt = f"What is {number} + 7?"
        return Task(task_id=f"sum/{number}", env="math", prompt=prompt, data=data)

    return [task(number) for number in range(first, first + count)]


def _config(root: Path, sandbox_kind: str, layout: dict[str, Json] | None = None) -> ServiceConfig:
    more = slots(6)
    for name, value in (layout or {"workers": 0}).items():
        more[name] = {**more.get(name, {}), **value} if isinstance(value, dict) else value
    return settings(root, sandbox_kind, POLICY, **more)


def _busy(name: str, view: dict[str, Json]) -> bool:
    """Returns whether the process holds work now, as far as the log can tell."""
    counts = view["counts"]
    if name == "store":
        return bool(counts.get("reserved", 0) + counts.get("running", 0))
    return bool(counts.get("running", 0))


async def _strike(
    running: Supervisor, client: Client, name: str, strike: signal.Signals, times: int
) -> None:
    child = running.children[name]
    for _ in range(times):
        seen: dict[str, Json] = {}

        async def busy(seen: dict[str, Json] = seen) -> bool:
            seen.update(await view(client))
            return _busy(name, seen)

        await until(busy, f"{name} holds work")
        starts, commits = child.starts, int(seen["commits"])
        child.signal(strike)

        async def back(starts: int = starts, commits: int = commits) -> bool:
            num_commits = int((await view(client))["commits"])
            # Deaths in a row with no commit that the supervisor is told of would be a crash loop.
            running.note_commits(num_commits)
            return child.starts > starts and child.beats and num_commits > commits

        await until(back, f"{name} is back and something was committed")


PROGRAM = f"command: python3 -c {shlex.quote(LOOP)}"
TOGETHER: dict[str, Json] = {"workers": 0}
STRUCK = [
    *((name, TOGETHER, "native") for name in ("service", "sandboxd")),
    *((name, TOGETHER, PROGRAM) for name in ("service", "sandboxd")),
    *((name, APART, "native") for name in ("service", "worker-0", "eval-0", "store")),
]
IDS = [
    "-".join((name, "apart" if layout is APART else "together", agent.partition(":")[0]))
    for name, layout, agent in STRUCK
]


@pytest.mark.parametrize(("name", "layout", "agent"), STRUCK, ids=IDS)
@pytest.mark.parametrize(
    ("strike", "times"), [(signal.SIGKILL, KILLS), (signal.SIGSTOP, FREEZES)], ids=["kill", "stop"]
)
async def test_struck_again_and_again_while_it_holds_work(
    tmp_path: Path,
    name: str,
    layout: dict[str, Json],
    agent: str,
    strike: signal.Signals,
    times: int,
    sandbox_kind: str,
) -> None:
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    config = _config(root, sandbox_kind, layout)
    async with signals() as stop, service(config, stop) as running:
        assert isinstance(running, Supervisor)
        # Struck again the moment that it is back, `service` may be away at each try of 20 s.
        client = client_of(running, PATIENCE_S)
        await asyncio.to_thread(client.create_run, run_id="r", agent=agent, limits=LIMITS)
        strikes = _strike(running, client, name, strike, times)
        expected, _ = await struck(running, client, strikes, _tasks, WAVE)
        assert running.restarts == times
    check_no_leftovers(root, before)
    stored = check_complete(root / "r", expected)
    assert rows(stored, "select status, count(*) as n from rollouts group by 1") == [
        {"status": "completed", "n": expected}
    ]
    assert rows(stored, "select count(*) as n from rollouts where reward = 1") == [{"n": expected}]


@pytest.mark.parametrize("workers", [0, 1], ids=["together", "workers"])
async def test_the_sandboxes_of_a_killed_chain_end_when_it_restarts(
    tmp_path: Path, workers: int, sandbox_kind: str
) -> None:
    """Though no rollout of it begins again, which would end what its earlier attempts have left."""
    more: dict[str, Json] = {"workers": workers, "sandbox": {"kind": sandbox_kind, "warm": 0}}
    config = _config(tmp_path / "root", sandbox_kind, more)
    config = config.model_copy(update={"backends": ("scripted:oracle?delay_s=600",)})
    async with signals() as stop, service(config, stop) as running:
        assert isinstance(running, Supervisor)
        client = client_of(running, PATIENCE_S)
        host = UnixSandboxHost(str(running.config.sandbox_socket))
        limits = {"max_attempts": 1, "max_worker_losses": 0}
        await asyncio.to_thread(client.create_run, run_id="r", journal="off", limits=limits)
        await asyncio.to_thread(client.submit, "r", _tasks(0, 12), 1, key="k")

        async def full() -> bool:
            return int((await view(client))["counts"].get("running", 0)) == 6

        async def have_ended() -> bool:
            return not (await host.status())["sandboxes"]

        await until(full, "RUN is full")
        assert not await have_ended()
        running.children["worker-0" if workers else "service"].signal(signal.SIGKILL)
        await asyncio.to_thread(client.cancel, "r")
        await until(have_ended, "no sandbox is left")
        assert running.restarts == 1
        await host.close()


def _has_socket(pid: int) -> bool:
    """Returns whether a process has connected, and not only begun."""
    fds = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.readlink(fd).startswith("socket:") for fd in fds)


def _programs(sandboxd: int) -> list[tuple[int, int]]:
    """Programs that wait for a reply, each with its sandbox: what its launcher began below it."""
    programs = []
    for pid in descendants(sandboxd):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if words.startswith(b"python3\0-c\0") and state == "S" and _has_socket(pid):
                programs.append((pid, int(Path(f"/proc/{pid}/stat").read_text().split()[3])))
    return programs


@pytest.mark.parametrize("what", ["program", "sandbox"])
async def test_programs_and_their_sandboxes_killed_in_the_middle_of_a_call(
    tmp_path: Path, what: str, sandbox_kind: str
) -> None:
    """A sandbox that dies is ours; a program's end is the rollout's, whoever ended it."""
    before = set(descendants(os.getpid()))
    root, victims = tmp_path / "root", set[int]()
    async with signals() as stop, service(_config(root, sandbox_kind), stop) as running:
        assert isinstance(running, Supervisor)
        client = client_of(running, PATIENCE_S)
        await asyncio.to_thread(client.create_run, run_id="r", agent=PROGRAM, limits=LIMITS)

        async def strike() -> None:
            for _ in range(KILLS):
                there: list[tuple[int, int]] = []

                async def asks(there: list[tuple[int, int]] = there) -> bool:
                    process = running.children["sandboxd"].pid
                    there[:] = [
                        program for program in _programs(process) if program[0] not in victims
                    ]
                    return bool(there)

                await until(asks, "a program waits for its reply")
                program, server = there[0]
                victims.add(program)
                with suppress(ProcessLookupError):
                    os.kill(program if what == "program" else server, signal.SIGKILL)

        expected, _ = await struck(running, client, strike(), _tasks, WAVE)
        assert running.restarts == 0
    check_no_leftovers(root, before)
    stored = check_complete(root / "r", expected)
    assert rows(stored, "select status, count(*) as n from rollouts group by 1") == [
        {"status": "completed", "n": expected}
    ]
    (totals,) = rows(
        stored,
        "select sum(attempt - 1)::int as again, count(*) filter (reward < 1) as less from rollouts",
    )
    print(what, len(victims), "killed of", expected, totals)
    assert totals["again"] <= KILLS
    if what == "sandbox":
        assert totals["again"] > 0
        assert totals["less"] == 0
    else:
        assert totals["less"] <= KILLS


def _start(root: Path, tasks: Path, sandbox_kind: str, *more: str) -> subprocess.Popen[bytes]:
    sets = [
        "--set",
        f"service.sandbox.kind={sandbox_kind}",
        "--set",
        "service.run.slots=4",
        "--set",
        "run.limits.max_attempts=40",
        "--set",
        "run.limits.max_worker_losses=40",
    ]
    fresh = ["--tasks", str(tasks), "--policy", POLICY, "--name", "r", *sets]
    argv = [
        sys.executable,
        "-m",
        "prorl.cli",
        "run",
        "--root",
        str(root),
        "--quiet",
        *(more or fresh),
    ]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


async def _commits(root: Path) -> int:
    return len(list((root / "r" / "commits").glob("*.json")))


async def test_the_supervisor_killed_ten_times_and_resumed(
    tmp_path: Path, sandbox_kind: str
) -> None:
    before = set(descendants(os.getpid()))
    root, path = tmp_path / "root", tmp_path / "tasks.jsonl"
    count = 300
    lines = [
        {"task_id": t.task_id, "env": t.env, "prompt": t.prompt, "data": dict(t.data)}
        for t in _tasks(0, count)
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    for life in range(KILLS):
        process = _start(
            root,
            path,
            sandbox_kind,
            *(["--resume", "r"] if life and (root / "r" / "job.json").exists() else []),
        )
        seen = await _commits(root)

        async def progressed(seen: int = seen) -> bool:
            return await _commits(root) > seen

        await until(progressed, "a commit")
        children = descendants(process.pid)
        ticks = {pid: start_ticks(pid) for pid in children}
        assert process.poll() is None, "the run ended before the last kill: give it more work"
        process.kill()
        process.communicate()

        async def have_exited(ticks: dict[int, int | None] = ticks) -> bool:
            return all(
                start_ticks(pid) is None or start_ticks(pid) != started
                for pid, started in ticks.items()
            )

        await until(have_exited, "the children die with the supervisor")
    process = _start(root, path, sandbox_kind, "--resume", "r")
    _, errors = await asyncio.to_thread(process.communicate, None, 120)
    assert process.returncode == 0, errors.decode()
    check_no_leftovers(root, before)
    stored = check_complete(root / "r", count)
    assert rows(stored, "select count(*) as n from rollouts where reward = 1") == [{"n": count}]
