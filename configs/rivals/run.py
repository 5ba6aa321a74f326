"""`make rivals`: the same tasks, model server and cores for prorl and its rivals, then with faults.

`python configs/rivals/run.py [all|clean|faults|table] [NAME ...]`, in prorl's environment. Each
player is a trainer's process (`play_NAME.py`, in the environment of its framework) and the daemons
that its framework needs. A process that dies is started again after a second, as by a service
manager. A cell is one run of one player, whole or with one fault. When a cell ends, its row is
appended to `configs/rivals/results/cells.jsonl`, and the tables are written anew; so an interrupted
measurement loses at most one cell, and the same command at the same commit does the others. No cell
takes longer than its limit, even if a framework hangs. `docs/rivals.md` describes each set-up and
the columns.

Variables, `RIVALS_...`: TASKS (groups of four a clean cell; half as many with a fault), IN_FLIGHT
(rollouts), REPEATS (of clean cells), LIMIT_S (of a cell), BUDGET_S (of all cells), FAULTS (only
these, by commas), RESULTS (another folder), AGAIN (measure existing cells, too).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from prorl.bench.meter import CpuMeter, cpu_meter, pss_mb
from prorl.bench.report import machine
from prorl.linux import procfs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
import chain  # noqa: E402

VENVS = Path(os.environ.get("PRORL_RIVALS", ROOT / ".venv-rivals"))
RESULTS = Path(os.environ.get("RIVALS_RESULTS", HERE / "results"))
TASKS, N = int(os.environ.get("RIVALS_TASKS", "48")), 4
IN_FLIGHT = int(os.environ.get("RIVALS_IN_FLIGHT", "32"))
CALLS = 4
"""Of the model, a rollout."""
BATCH = 8
"""Groups of a trainer's step."""
REPEATS = int(os.environ.get("RIVALS_REPEATS", "3"))
AGAIN_S = 1.0
"""The pause of a service manager before it starts a process again."""
FROZEN_S = 30.0
LIMIT_S = float(os.environ.get("RIVALS_LIMIT_S", "200"))
"""The limit of a cell; rollouts that are missing then are lost."""
BUDGET_S = float(os.environ.get("RIVALS_BUDGET_S", "2280"))
"""The limit of all cells together; none begins in the last minute."""
QUIET = 0.15
"""The share of the cores' time that other programs may take; above it the columns of wall time are
left out.
"""


@dataclass(frozen=True)
class Player:
    name: str
    python: Path
    daemons: Callable[[Path, str, int], dict[str, list[str]]] = lambda folder, url, port: {}
    """Commands of the processes beside the trainer, by name, for a folder, the model's URL and a
    free port.
    """
    kinds: dict[str, str] = field(default_factory=dict)
    """Further kinds of process below these, by a part of their command line."""
    env: dict[str, str] = field(default_factory=dict)
    script: str = ""
    """Its trainer is `play_SCRIPT.py`, by default `play_NAME.py`."""
    only: str = ""
    """`clean` or `faults`: the player has cells of this kind only."""


def venv(name: str) -> Path:
    return VENVS / name / "bin" / "python"


def prorl_daemons(
    folder: Path, url: str, port: int, kind: str = "pyns", workers: int | str = "auto"
) -> dict[str, list[str]]:
    settings = {
        "sandbox.kind": kind,
        "workers": workers,
        "tokenizer": ROOT / "prorl" / "assets" / "toy",
        "load_code": "true",
        "run.slots": IN_FLIGHT,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"service.{key}={value}")]
    argv = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(folder / "root")]
    return {"supervisor": [*argv, "--policy", url, *sets]}


def served(name: str) -> Callable[[Path, str, int], dict[str, list[str]]]:
    """A framework's own server, by `serve_NAME.py`."""
    script = str(HERE / f"serve_{name}.py")
    return lambda folder, url, port: {"env server": [str(venv(name)), script, str(port)]}


MINI = {"MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
VERIFIERS = {
    "HOME": str(VENVS / "verifiers" / "home"),  # where the environment of its agent was made
    "PATH": f"{venv('verifiers').parent}:{os.environ['PATH']}",
    "UV_PYTHON_DOWNLOADS": "never",
}
PLAYERS = {
    player.name: player
    for player in (
        Player(
            "verifiers", venv("verifiers"), served("verifiers"), {"worker": "spawn_main"}, VERIFIERS
        ),
        Player("skyrl", venv("skyrl")),
        Player("mini", venv("mini"), env=MINI),
        Player("openenv", venv("openenv"), served("openenv")),
        Player(
            "prorl",
            Path(sys.executable),
            prorl_daemons,
            {
                "service": "prorl.deploy.service",
                "sandboxd": "prorl.sandbox.node.daemon",
            },
        ),
        Player(
            "prorl-apptainer",
            Path(sys.executable),
            partial(prorl_daemons, kind="apptainer"),
            script="prorl",
            only="clean",
        ),
        Player(
            "prorl-workers",
            Path(sys.executable),
            partial(prorl_daemons, workers=1),
            {"service": "prorl.deploy.service", "worker": "prorl.stages"},
            script="prorl",
            only="faults",
        ),
    )
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Process:
    """A process that is started again when it dies, until it ends well or is told to end."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str], ends: bool) -> None:
        self._argv, self._log, self._env, self._ends = argv, log, env, ends
        self.starts, self.dead_at = 0, 0.0
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self._log.open("ab") as log:
            self.child = subprocess.Popen(
                self._argv,
                stdout=log,
                stderr=log,
                env=os.environ | self._env,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Start it again if it died a while ago. Returns whether it ended with status 0."""
        code = self.child.poll()
        if code is None:
            return False
        if self._ends and code == 0:
            return True
        if not self.dead_at:
            self.dead_at = time.monotonic()
        elif time.monotonic() - self.dead_at > AGAIN_S:
            self.dead_at = 0.0
            self.start()
        return False

    def end(self) -> None:
        tree = [self.child.pid, *procfs.descendants(self.child.pid)]
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                pass
        for pid in tree:  # those of its children that it did not end itself
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.child.wait()


def end_strays(cell: str) -> None:
    """End what a killed process of this cell left: the environment of its children names the
    cell.
    """
    mark = f"RIVALS_CELL={cell}".encode()
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def model(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    argv = [sys.executable, str(HERE / "model.py"), str(port), str(HERE / "latencies.txt")]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield server, f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGCONT)
            server.terminate()


def pid_of(player: Player, processes: dict[str, Process], kind: str) -> int | None:
    if kind in processes:
        return processes[kind].child.pid
    for process in processes.values():
        for pid in procfs.descendants(process.child.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if player.kinds[kind] in words:
                return pid
    return None


def play(player: Player, fault: str, tasks: list[int], limit_s: float) -> dict:
    """One run. `fault`: the kind of process that is killed once when a quarter is delivered, or
    `frozen`.
    """
    with tempfile.TemporaryDirectory(prefix="rivals-") as name, ExitStack() as stack:
        folder = Path(name)
        server, url = stack.enter_context(model(folder))
        job = {"folder": name, "url": url, "tasks": tasks, "n": N, "in_flight": IN_FLIGHT}
        port = free_port()
        job |= {"port": port, "tokenizer": str(ROOT / "prorl" / "assets" / "toy")}
        meter = stack.enter_context(cpu_meter())
        env = player.env | {"PYTHONPATH": str(HERE), "OPENAI_API_KEY": "none", "RIVALS_CELL": name}
        stack.callback(end_strays, name)
        processes = {
            kind: Process(argv, folder / f"{kind}.log", env, ends=False)
            for kind, argv in player.daemons(folder, url, port).items()
        }
        trainer = [
            str(player.python),
            str(HERE / f"play_{player.script or player.name}.py"),
            json.dumps(job),
        ]
        processes["trainer"] = Process(trainer, folder / "trainer.log", env, ends=True)
        for process in reversed(processes.values()):  # the trainer waits for the daemons
            stack.callback(process.end)
        figures = watch(player, folder, processes, server, meter, fault, len(tasks) * N, limit_s)
        calls = json.loads(urllib.request.urlopen(f"{url}/calls", timeout=30).read())
        figures |= lost_work(calls, figures["struck_at"], figures["on_at"])
        figures["calls"] = len(calls)
        for process in processes.values():
            process.end()
        return figures


def watch(
    player: Player,
    folder: Path,
    processes: dict[str, Process],
    server: subprocess.Popen[str],
    meter: CpuMeter,
    fault: str,
    num_rollouts: int,
    limit_s: float,
) -> dict:
    watched: set[int] = set()
    began, before_s, busy_s = time.time(), meter.cpu_s(), machine_s(server.pid)
    peak_mb, fault_at, thawed_at, measured_at, ended = 0.0, 0.0, 0.0, 0.0, False
    middle: list[tuple[int, float]] = []
    delivered = folder / "delivered.jsonl"
    while time.time() < began + limit_s and not ended:
        for process in processes.values():
            if process.child.pid not in watched:  # its first start, or a later one
                watched.add(process.child.pid)
                with contextlib.suppress(ProcessLookupError):
                    meter.watch(process.child.pid)
        time.sleep(0.05)
        ended = processes["trainer"].poll()
        for kind, process in processes.items():
            if kind != "trainer":
                process.poll()
        count = sum(len(line["rollouts"]) for line in chain.read(delivered))
        if count >= num_rollouts / 4 and not middle:
            middle = [(count, meter.cpu_s())]
        if not fault and time.time() - measured_at > 4.0:  # 2 ms a process
            measured_at = time.time()
            peak_mb = max(peak_mb, sum(pss_mb(process.child.pid) for process in processes.values()))
        if fault and not fault_at and not ended and count >= num_rollouts / 4:
            if fault == "frozen":
                server.send_signal(signal.SIGSTOP)
                fault_at = time.time()
            elif pid := pid_of(player, processes, fault):
                os.kill(pid, signal.SIGKILL)
                fault_at = time.time()
        is_frozen = fault == "frozen" and fault_at and not thawed_at
        if is_frozen and time.time() - fault_at > FROZEN_S:
            server.send_signal(signal.SIGCONT)
            thawed_at = time.time()
    server.send_signal(signal.SIGCONT)
    lines = chain.read(delivered)
    from_count, from_s = middle[0] if middle else (0, before_s)
    figures = summary(lines, num_rollouts, began, fault_at, thawed_at or fault_at)
    cpu_s, took_s = meter.cpu_s() - before_s, time.time() - began
    others_s = machine_s(server.pid) - busy_s - cpu_s
    return figures | {
        "cpu_ms": 1e3 * (meter.cpu_s() - from_s) / max(1, figures["rollouts"] - from_count),
        "cpu_s": cpu_s,
        "others": max(0.0, others_s) / took_s / len(os.sched_getaffinity(0)),
        "took_s": took_s,
        "limit": not ended,
        "peak_mb": peak_mb,
        "struck_at": fault_at,
        "on_at": thawed_at or fault_at,
        "starts": {kind: process.starts for kind, process in processes.items()},
    }


def machine_s(server: int) -> float:
    """CPU seconds that all cores were busy, or taken by another machine, but for the measurement
    itself: this process and the model's server.
    """
    words = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own_s = time.process_time() + procfs.cpu_s(server)
    return (sum(words) - words[3] - words[4]) / os.sysconf("SC_CLK_TCK") - own_s


def summary(
    lines: list[dict], num_rollouts: int, began: float, fault_at: float, free_at: float
) -> dict:
    """Counts and times of a trainer's deliveries. `fault_at`: when the fault came; `free_at`: since
    when one could go on.
    """
    times: dict[int, list[float]] = {}
    counts, wrong = Counter[tuple[int, int]](), 0
    for line in lines:
        for task, sample, reward in line["rollouts"]:
            counts[task, sample] += 1
            wrong += reward != 1.0
            times.setdefault(task, []).append(line["at"])
    groups = sorted(max(at) for task, at in times.items() if len(at) >= N)
    first = min((line["at"] for line in lines), default=began)
    last = max((line["at"] for line in lines), default=began)
    after = [at for at in groups if at > free_at] if fault_at else []
    return {
        "rollouts": len(counts),
        "lost": num_rollouts - len(counts),
        "twice": sum(count - 1 for count in counts.values()),
        "wrong": wrong,
        "first_s": first - began,
        "wall_s": last - began,
        "rate": (len(counts) * 3 / 4) / max(1e-9, last - quarter(groups)) if groups else 0.0,
        "idle": idle(groups),
        "group_s": after[0] - free_at if after else None,
        "group_gap_s": longest_wait(free_at, after),
    }


def longest_wait(start: float, times: list[float]) -> float | None:
    """The longest time from one to the next; None if `times` is empty."""
    return max((b - a for a, b in itertools.pairwise([start, *times])), default=None)


def lost_work(calls: list[list], fault_at: float, free_at: float) -> dict:
    """Calls of the model that were sampled more often than a rollout needs them, and their seconds;
    beside them the seconds that would have been sampled again if each rollout that was running when
    the fault came had begun anew. In whole calls, since a model server ends those that no client
    waits for.

    Two calls, the first ended: a fault at 5 would cost a restart from the prompt both, 1 + 2 s.

    >>> calls = [[100, 0, 1.0, 1.0, 2.0], [100, 1, 4.0, 2.0, 6.0]]
    >>> lost_work(calls, 5.0, 5.0)
    {'again': 0, 'again_s': 0.0, 'prompt_s': 3.0, 'call_s': None, 'call_gap_s': None}
    """
    count, seconds = Counter[tuple[int, int]](), {}
    before, finished = Counter[tuple[int, int]](), Counter[int]()
    for task, turn, came, takes_s, ended in calls:
        count[task, turn] += 1
        seconds[task, turn] = takes_s
        before[task, turn] += came < fault_at
        finished[task] += turn == CALLS - 1 and ended is not None and ended < fault_at
    after = sorted(came for _, _, came, *_ in calls if came > free_at) if fault_at else []
    again = {at: max(0, count[at] - N) for at in count}
    return {
        "again": sum(again.values()),
        "again_s": sum(seconds[at] * more for at, more in again.items()),
        "prompt_s": sum(
            seconds[at] * max(0, before[at] - finished[at[0]]) for at in count if before[at]
        ),
        "call_s": after[0] - free_at if after else None,
        "call_gap_s": longest_wait(free_at, after),
    }


def quarter(groups: list[float]) -> float:
    """The time when a quarter of the groups was delivered; what comes before is start-up."""
    return groups[max(0, len(groups) // 4 - 1)]


def idle(groups: list[float]) -> float | None:
    """The share of time that a trainer waits whose step takes as long as the model alone needs for
    a batch; from its first batch on, if there is a second.
    """
    latencies = [float(word) for word in (HERE / "latencies.txt").read_text().split()]
    step_s = BATCH * N * CALLS * statistics.mean(latencies) / IN_FLIGHT
    waits, free_at = 0.0, 0.0
    for end in range(BATCH - 1, len(groups), BATCH):
        if free_at:
            waits += max(0.0, groups[end] - free_at)
        free_at = max(free_at, groups[end]) + step_s
    steps = len(groups) // BATCH
    return waits / (waits + step_s * (steps - 1)) if steps > 1 else None


@dataclass(frozen=True)
class Cell:
    player: str
    fault: str
    turn: int

    def of(self, row: dict) -> bool:
        return (row["player"], row["fault"], row["turn"]) == (self.player, self.fault, self.turn)


def cells(what: str, names: list[str]) -> list[Cell]:
    """The most important ones first; players alternate, so that a slow minute of the machine hits
    all of them.
    """
    chosen: list[Cell] = []
    whole = [name for name in names if PLAYERS[name].only != "faults"]
    if what != "faults":
        chosen += [Cell(name, "", 0) for name in whole]
    if what != "clean":
        faults = [
            Cell(name, kind, 0)
            for name in names
            if (player := PLAYERS[name]).only != "clean"
            for kind in (*player.daemons(Path(), "", 0), *player.kinds, "trainer", "frozen")
        ]
        if only := os.environ.get("RIVALS_FAULTS"):
            kinds = sorted({cell.fault for cell in faults})
            if unknown := set(only.split(",")) - set(kinds):
                sys.exit(f"error: RIVALS_FAULTS: no {sorted(unknown)}; one of {kinds}")
            faults = [cell for cell in faults if cell.fault in only.split(",")]
        chosen += faults
    if what != "faults":
        chosen += [Cell(name, "", turn) for turn in range(1, REPEATS) for name in whole]
    return chosen


def commit() -> str:
    argv = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()


def rows() -> list[dict]:
    path = RESULTS / "cells.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(chosen: list[Cell]) -> None:
    """Measure each cell that has no row of this commit and these settings."""
    until = time.monotonic() + BUDGET_S
    RESULTS.mkdir(exist_ok=True)
    for cell in chosen:
        tasks = list(range(100, 100 + (TASKS // 2 if cell.fault else TASKS)))
        settings = {"commit": commit(), "tasks": len(tasks), "in_flight": IN_FLIGHT}
        old = [row for row in rows() if cell.of(row)]
        if old and settings.items() <= old[0].items() and "RIVALS_AGAIN" not in os.environ:
            continue
        left_s = until - time.monotonic()
        if left_s < 60.0:
            print(f"no time left for {cell}", flush=True)
            continue
        about = asdict(cell) | settings | {"load": os.getloadavg()[0], "machine": machine()}
        try:
            row = about | play(PLAYERS[cell.player], cell.fault, tasks, min(LIMIT_S, left_s))
        except OSError as error:
            print(f"{cell} could not be measured: {error}", flush=True)
            continue
        printed = ("took_s", "lost", "twice", "wrong", "again")
        print(cell, {key: round(row[key]) for key in printed}, flush=True)
        earlier = [each for each in rows() if not cell.of(each) and not is_outdated(each, row)]
        write(RESULTS / "cells.jsonl", "".join(json.dumps(each) + "\n" for each in [*earlier, row]))
        write(RESULTS / "table.md", table(rows()))


def is_outdated(old: dict, row: dict) -> bool:
    """Returns whether an old row is of the same player and fault, but of another commit or other
    settings.
    """
    same = all(old[key] == row[key] for key in ("player", "fault"))
    return same and any(old[key] != row[key] for key in ("commit", "tasks", "in_flight"))


def write(path: Path, text: str) -> None:
    """Whole or not at all, also if this process is killed."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def table(measured: list[dict]) -> str:
    """The tables of docs/rivals.md; columns of wall time only if other programs took little."""
    quiet = all(row["others"] < QUIET for row in measured if not row["fault"])
    order = list(PLAYERS)
    lines = [conditions(measured, quiet), ""]
    heads = ["framework", "rollouts", *(["rollouts/s", "trainer idle"] if quiet else [])]
    lines += head([*heads, "CPU ms a rollout", "MB at most", "MB a rollout in hand", *COUNTED])
    for name in sorted({row["player"] for row in measured}, key=order.index):
        own = [row for row in measured if (row["player"], row["fault"]) == (name, "")]
        if own:
            lines.append(line(clean_cells(name, own, quiet)))
    heads = [
        "framework",
        "process killed, or server frozen",
        *COUNTED,
        "calls again",
        "their seconds",
        "from the prompt",
    ]
    waits = ["next call s", "longest between calls s", "next group s", "longest between groups s"]
    lines += ["", *head([*heads, *waits])]
    faulty = [row for row in measured if row["fault"]]
    for row in sorted(faulty, key=lambda row: order.index(row["player"])):
        lines.append(line(fault_cells(row)))
    return "\n".join(lines) + "\n"


COUNTED = ["lost", "twice", "wrong"]


def conditions(measured: list[dict], quiet: bool) -> str:
    """The machine, the commit and the load of other programs."""
    if not measured:
        return "Nothing was measured yet."
    first = measured[0]
    commits = ", ".join(sorted({row["commit"] for row in measured}))
    others = [row["others"] for row in measured]
    text = (
        f"{first['machine']['cores']} cores, {first['machine']['cpu']}, commit {commits}; "
        f"other programs took {min(others):.0%} to {max(others):.0%} of the cores' time"
    )
    return f"{text}." if quiet else f"{text}, so that rollouts a second are left out."


def head(names: list[str]) -> list[str]:
    return [line(names), "|" + "---|" * len(names)]


def line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def clean_cells(name: str, own: list[dict], quiet: bool) -> list[str]:
    """Medians of the repeats, and sums of counts."""

    def middle(key: str) -> float:
        return statistics.median(row[key] for row in own)

    clock = []
    if quiet:
        waits = "too few" if own[0]["idle"] is None else f"{middle('idle'):.0%}"
        clock = [f"{middle('rate'):.1f}", waits]
    repeats = f"{len(own)} x {own[0]['tasks'] * N}, {own[0]['in_flight']} at a time"
    size = [f"{middle('cpu_ms'):.0f}", f"{middle('peak_mb'):.0f}"]
    size.append(f"{middle('peak_mb') / own[0]['in_flight']:.0f}")
    return [name, repeats, *clock, *size, *(str(sum(row[key] for row in own)) for key in COUNTED)]


def fault_cells(row: dict) -> list[str]:
    def seconds(key: str) -> str:
        return "never" if row[key] is None else f"{row[key]:.1f}"

    if not row["struck_at"]:
        return [row["player"], row["fault"], "did not happen", *[""] * 9]
    counts = [str(row[key]) for key in (*COUNTED, "again")]
    work = [f"{row['again_s']:.1f}", f"{row['prompt_s']:.1f}"]
    waits = [seconds(key) for key in ("call_s", "call_gap_s", "group_s", "group_gap_s")]
    if row["limit"]:
        waits[-1] += f", ended after {row['took_s']:.0f} s"
    return [row["player"], row["fault"], *counts, *work, *waits]


def main() -> None:
    what, *names = sys.argv[1:] or ["all"]
    if what == "table":
        print(table(rows()), end="")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its processes end with it
    measure(cells(what, names or list(PLAYERS)))
    print(table(rows()), end="")


if __name__ == "__main__":
    main()
