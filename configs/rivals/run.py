"""`make rivals`: the same tasks, model server and cores for prorl and its rivals, then with faults.

`python configs/rivals/run.py [clean|faults] [NAME ...]`, in prorl's environment. Each player is a
trainer's process (`play_NAME.py`, in the environment of its framework) and the daemons that its
framework asks for; who dies is started again after a second, as a service manager does. The rows
and the raw repeats are written to `configs/rivals/results/`. `docs/rivals.md` says how each was
set up, and what the columns mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from dataclasses import dataclass, field
from pathlib import Path

from prorl.bench.meter import CpuMeter, cpu_meter, pss_mb
from prorl.bench.report import machine
from prorl.linux import procfs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
import chain  # noqa: E402

VENVS = Path(os.environ.get("PRORL_RIVALS", ROOT / ".venv-rivals"))
TASKS = list(range(100, 100 + int(os.environ.get("RIVALS_TASKS", "48"))))
N, IN_FLIGHT = 4, int(os.environ.get("RIVALS_IN_FLIGHT", "32"))
ROLLOUTS = len(TASKS) * N
CALLS = 4
"""Of the model, a rollout."""
BATCH = 8
"""Groups of a trainer's step."""
REPEATS = int(os.environ.get("RIVALS_REPEATS", "3"))
AGAIN_S = 1.0
"""A service manager waits so long before it starts again what died."""
FROZEN_S = 30.0
START_S = 900.0
"""Until the first rollout: a loaded machine imports some of these for minutes."""
PATIENCE_S = 150.0
"""From the first rollout on, and from a fault on: what is missing then is lost."""


@dataclass(frozen=True)
class Player:
    name: str
    python: Path
    daemons: Callable[[Path, str, int], dict[str, list[str]]] = lambda folder, url, port: {}
    """What runs beside the trainer, by name, for a folder, the model's URL and a free port."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Further kinds of process below these, by a part of their command line."""
    env: dict[str, str] = field(default_factory=dict)


def venv(name: str) -> Path:
    return VENVS / name / "bin" / "python"


def prorl_daemons(folder: Path, url: str, port: int) -> dict[str, list[str]]:
    settings = {
        "tokenizer": ROOT / "prorl" / "assets" / "toy",
        "load_code": "true",
        "run.slots": IN_FLIGHT,
        "init.slots": IN_FLIGHT,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"service.{key}={value}")]
    argv = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(folder / "root")]
    return {"supervisor": [*argv, "--policy", url, *sets]}


def served(name: str) -> Callable[[Path, str, int], dict[str, list[str]]]:
    """A framework's own server, by `serve_NAME.py`."""
    script = str(HERE / f"serve_{name}.py")
    return lambda folder, url, port: {"env server": [str(venv(name)), script, str(port)]}


MINI = {"MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
PLAYERS = {
    one.name: one
    for one in (
        Player("verifiers", venv("verifiers"), served("verifiers"), {"worker": "spawn_main"}),
        Player("skyrl", venv("skyrl")),
        Player("mini", venv("mini"), env=MINI),
        Player("openenv", venv("openenv"), served("openenv")),
        Player(
            "prorl",
            Path(sys.executable),
            prorl_daemons,
            {
                "gateway": "prorl.service",
                "store": "prorl.storage",
                "sandboxd": "prorl.sandbox.node.daemon",
                "init": "stage init",
                "run": "stage run",
                "eval": "stage eval",
            },
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

    def tend(self) -> bool:
        """Whether it ended well; start it again if it died a while ago."""
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
        for pid in tree:  # what it did not end itself: these pids were its own a moment ago
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.child.wait()


@contextmanager
def model(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    argv = [sys.executable, str(HERE / "model.py"), str(port), str(HERE / "latencies.txt")]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(10)


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


def play(player: Player, fault: str = "") -> dict:
    """One run. `fault`: the kind of process to kill once, or `frozen`, when a quarter is done."""
    with tempfile.TemporaryDirectory(prefix="rivals-") as name, ExitStack() as stack:
        folder = Path(name)
        server, url = stack.enter_context(model(folder))
        job = {"folder": name, "url": url, "tasks": TASKS, "n": N, "in_flight": IN_FLIGHT}
        port = free_port()
        job |= {"port": port, "tokenizer": str(ROOT / "prorl" / "assets" / "toy")}
        meter = stack.enter_context(cpu_meter())
        env = player.env | {"PYTHONPATH": str(HERE), "OPENAI_API_KEY": "none"}
        processes = {
            kind: Process(argv, folder / f"{kind}.log", env, ends=False)
            for kind, argv in player.daemons(folder, url, port).items()
        }
        trainer = [str(player.python), str(HERE / f"play_{player.name}.py"), json.dumps(job)]
        processes["trainer"] = Process(trainer, folder / "trainer.log", env, ends=True)
        for process in reversed(processes.values()):  # the trainer waits for the daemons
            stack.callback(process.end)
        seen = watch(player, folder, processes, server, meter, fault)
        for process in processes.values():
            process.end()
        seen["calls"] = int(urllib.request.urlopen(f"{url}/served").read())
        if keep := os.environ.get("RIVALS_KEEP"):
            shutil.copytree(
                folder,
                Path(keep) / f"{player.name}-{fault or 'clean'}",
                symlinks=True,
                dirs_exist_ok=True,
                ignore=lambda *_: ["control.db"],
            )
        return seen


def watch(
    player: Player,
    folder: Path,
    processes: dict[str, Process],
    server: subprocess.Popen[str],
    meter: CpuMeter,
    fault: str,
) -> dict:
    watched = {process.child.pid for process in processes.values()}
    for pid in watched:
        meter.watch(pid)
    began, before_s = time.time(), meter.cpu_s()
    peak_mb, struck, thawed, looked = 0.0, 0.0, False, 0.0
    middle: list[tuple[int, float]] = []
    delivered = folder / "delivered.jsonl"
    until = began + START_S
    while time.time() < until:
        time.sleep(0.05)
        ended = processes["trainer"].tend()
        for kind, process in processes.items():
            if kind != "trainer":
                process.tend()
        for process in processes.values():
            if process.child.pid not in watched:  # a later life
                watched.add(process.child.pid)
                with contextlib.suppress(ProcessLookupError):
                    meter.watch(process.child.pid)
        if ended:
            break
        count = sum(len(line["rollouts"]) for line in chain.read(delivered))
        if count >= ROLLOUTS / 4 and not middle:
            middle = [(count, meter.cpu_s())]
            until = time.time() + PATIENCE_S
        if not fault and time.time() - looked > 2.0:
            looked = time.time()
            peak_mb = max(peak_mb, sum(pss_mb(one.child.pid) for one in processes.values()))
        if fault and not struck and count >= ROLLOUTS / 4:
            if fault == "frozen":
                server.send_signal(signal.SIGSTOP)
                struck = time.time()
            elif pid := pid_of(player, processes, fault):
                os.kill(pid, signal.SIGKILL)
                struck = time.time()
        if fault == "frozen" and struck and not thawed and time.time() - struck > FROZEN_S:
            server.send_signal(signal.SIGCONT)
            thawed = True
    server.send_signal(signal.SIGCONT)
    lines = chain.read(delivered)
    from_count, from_s = middle[0] if middle else (0, before_s)
    seen = summary(lines, began, struck)
    return seen | {
        "cpu_ms": 1e3 * (meter.cpu_s() - from_s) / max(1, seen["rollouts"] - from_count),
        "cpu_s": meter.cpu_s() - before_s,
        "peak_mb": peak_mb,
        "struck": bool(struck),
        "starts": {kind: process.starts for kind, process in processes.items()},
    }


def summary(lines: list[dict], began: float, struck: float) -> dict:
    """What a trainer had of a run, and when."""
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
    after = [at for at in groups if at > struck] if struck else []
    return {
        "rollouts": len(counts),
        "asked": ROLLOUTS,
        "in_flight": IN_FLIGHT,
        "lost": ROLLOUTS - len(counts),
        "twice": sum(count - 1 for count in counts.values()),
        "wrong": wrong,
        "first_s": first - began,
        "wall_s": last - began,
        "rate": (len(counts) * 3 / 4) / max(1e-9, last - quarter(groups)) if groups else 0.0,
        "idle": idle(groups),
        "gap_s": max((b - a for a, b in zip([struck, *after], after, strict=False)), default=0.0),
    }


def quarter(groups: list[float]) -> float:
    """When a quarter of the groups was there: start-up is not a rate."""
    return groups[len(groups) // 4 - 1]


def idle(groups: list[float]) -> float:
    """Share of a trainer's time that it waits, whose step takes what the model's latencies alone
    take for a batch; from its first batch on.
    """
    latencies = [float(word) for word in (HERE / "latencies.txt").read_text().split()]
    step_s = BATCH * N * CALLS * statistics.mean(latencies) / IN_FLIGHT
    waits, free_at = 0.0, 0.0
    for end in range(BATCH - 1, len(groups), BATCH):
        if free_at:
            waits += max(0.0, groups[end] - free_at)
        free_at = max(free_at, groups[end]) + step_s
    steps = len(groups) // BATCH
    return waits / (waits + step_s * (steps - 1)) if steps > 1 else float("nan")


def clean(names: list[str]) -> list[dict]:
    rows = []
    for turn in range(REPEATS):  # in turns: the machine's mood is everybody's
        for name in names:
            seen = play(PLAYERS[name])
            rows.append({"player": name, "turn": turn, **seen})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def faults(names: list[str]) -> list[dict]:
    rows = []
    for name in names:
        player = PLAYERS[name]
        kinds = [*player.daemons(Path(), "", 0), *player.kinds, "trainer", "frozen"]
        only = os.environ.get("RIVALS_FAULTS")
        for kind in kinds if not only else only.split(","):
            rows.append({"player": name, "fault": kind, **play(player, kind)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table() -> None:
    """What docs/rivals.md shows."""
    for what in ("clean", "faults"):
        found = json.loads((HERE / "results" / f"{what}.json").read_text())
        print(found["machine"])
        for row in medians(found["rows"]) if what == "clean" else found["rows"]:
            print("| " + " | ".join(cells(row)) + " |")


def medians(rows: list[dict]) -> Iterator[dict]:
    for name in dict.fromkeys(row["player"] for row in rows):
        mine = [row for row in rows if row["player"] == name]
        keys = ("rate", "cpu_ms", "peak_mb", "idle", "calls", "first_s", "in_flight")
        yield {"player": name} | {key: statistics.median(row[key] for row in mine) for key in keys}


def cells(row: dict) -> list[str]:
    if "fault" not in row:
        return [
            row["player"],
            f"{row['rate']:.1f}",
            f"{row['cpu_ms']:.0f}",
            f"{row['peak_mb']:.0f}",
            f"{row['peak_mb'] / row['in_flight']:.1f}",
            f"{row['idle']:.0%}",
        ]
    again = row["calls"] - CALLS * row["rollouts"]
    counts = [str(row[key]) for key in ("lost", "twice", "wrong")]
    return [row["player"], row["fault"], *counts, str(again), f"{row['gap_s']:.1f}"]


def main() -> None:
    what, *names = sys.argv[1:] or ["clean"]
    if what == "table":
        return table()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started ends with it
    rows = {"clean": clean, "faults": faults}[what](names or list(PLAYERS))
    out = HERE / "results"
    out.mkdir(exist_ok=True)
    path = out / f"{what}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(row["player"], row.get("fault")) for row in rows}
    kept = [row for row in old if (row["player"], row.get("fault")) not in new]
    text = ",\n".join(json.dumps(row) for row in kept + rows)
    path.write_text(f'{{"machine": {json.dumps(machine())}, "rows": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
