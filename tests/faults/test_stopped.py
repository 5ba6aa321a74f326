"""Any part of a service is stopped for a while (`docker pause`, `scontrol suspend`, a laptop's lid,
a disk that hangs) and goes on: nothing is lost, nothing is there twice, and no policy pays for it.

In both layouts: everything in one process `service`, and each part that can be in a process of its
own. `PRORL_FREEZES=pairs` stops every pair of processes for every length; the default is a table of
those that have differed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path

import pytest

import prorl
from prorl.client.client import Client
from prorl.errors import UnavailableError
from prorl.linux.procfs import descendants
from prorl.types import Task
from tests.integration.run_checks import check_complete, rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

COUNT, RUN_S, PATIENCE_S = 24, 30.0, 300.0
PARTS = {
    "service": ("prorl.deploy.service",),
    "store": ("prorl.storage",),
    "worker": ("prorl.stages", "worker-0"),
    "eval": ("prorl.stages", "eval-0"),
    "sandboxd": ("prorl.sandbox.node.daemon",),
    "supervisor": ("prorl.cli",),
    "model": ("tests.faults.model_server",),
}
"""Words of the command of each."""
EVERYTHING = ("everything",)
LENGTHS_S = (5, 12, 40, 60)
LAYOUTS = {
    "apart": (
        "service.workers=1",
        "service.eval.own_processes=1",
        "service.store.own_process=true",
    ),
    "together": ("service.workers=0",),
}
IN_SERVICE = {"store", "worker", "eval"}
"""Parts that have no process of their own when they are together."""
if os.environ.get("PRORL_FREEZES") == "pairs":
    _groups = [*((name,) for name in PARTS), *combinations(PARTS, 2)]
    _freezes = [(who, s) for who in _groups for s in LENGTHS_S]
else:
    _freezes = [((name,), 12) for name in PARTS]
    _freezes += [(pair, 40) for pair in (("service", "store"), ("service", "worker"))]
    _freezes += [(pair, 40) for pair in (("worker", "model"), ("service", "model"))]
    _freezes += [(("supervisor", "worker"), 40), (("supervisor", "service"), 40)]
FREEZES = [
    (layout, who, s)
    for layout in LAYOUTS
    for who, s in [(EVERYTHING, 40), *_freezes]
    if layout == "apart" or not IN_SERVICE & {*who}
]


class Frozen:
    """A service with a model server of its own, all of whose processes can be stopped."""

    def __init__(self, root: Path, sandbox_kind: str, layout: str) -> None:
        self.root = root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        model = [sys.executable, "-m", "tests.faults.model_server", port, os.devnull]
        self._before = set(descendants(os.getpid()))
        self._model = subprocess.Popen(model, stdout=subprocess.PIPE, text=True)
        serve = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(root)]
        sets = (
            f'service.backends=["http://127.0.0.1:{port}"]',
            "service.tokenizer=bytes",
            "service.run.slots=8",
            *LAYOUTS[layout],
            f"service.sandbox.kind={sandbox_kind}",
        )
        serve += [word for setting in sets for word in ("--set", setting)]
        self._service = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        for process, word in ((self._model, "ready"), (self._service, "serving")):
            assert process.stdout is not None
            assert any(line.startswith(word) for line in process.stdout), f"no {word!r}"

    def pids(self, who: tuple[str, ...]) -> list[int]:
        """Returns the pids of these parts, which the supervisor may be replacing just now."""
        ours = [pid for pid in descendants(os.getpid()) if pid not in self._before]
        if who == EVERYTHING:
            return ours
        matching_pids = []
        for pid in ours:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                matching_pids += [
                    pid for name in who if words[2:3] and set(PARTS[name]) <= set(words)
                ]
        return matching_pids

    def close(self) -> None:
        self._service.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._service.communicate(timeout=60)
        self._service.kill()
        self._model.kill()
        self._model.communicate()
        self._service.communicate()


@pytest.fixture(scope="module")
def frozen(
    tmp_path_factory: pytest.TempPathFactory, sandbox_kind: str, request: pytest.FixtureRequest
) -> Iterator[Frozen]:
    made = Frozen(tmp_path_factory.mktemp("stopped") / "root", sandbox_kind, request.param)
    yield made
    made.close()


def _until(holds: Callable[[Client], bool], client: Client, what: str) -> None:
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_S:
        with contextlib.suppress(UnavailableError):
            if holds(client):
                return
        time.sleep(0.1)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}")


@pytest.mark.parametrize(
    ("frozen", "who", "away_s"),
    FREEZES,
    ids=[f"{layout}-{'+'.join(who)}-{s}s" for layout, who, s in FREEZES],
    indirect=["frozen"],
)
def test_a_stop_is_charged_to_no_policy(frozen: Frozen, who: tuple[str, ...], away_s: int) -> None:
    run = f"{'-'.join(who)}-{away_s}"
    tasks = [
        Task(task_id=f"t{i}", env="math", prompt=f"{i} + 1?", data={"answer": str(i + 1)})
        for i in range(COUNT)
    ]
    with prorl.connect(frozen.root) as client:
        client.create_run(run_id=run, limits={"run_s": RUN_S})
        client.submit(run, tasks, n=1, key="k", last=True)
        _until(lambda c: c.run(run)["counts"]["running"] > 0, client, "it works")
        pids = frozen.pids(who)
        assert len(pids) >= len(who), f"{who} are {pids}"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(away_s)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended as silent, and replaced
                os.kill(pid, signal.SIGCONT)
        _until(lambda c: c.run(run)["state"] == "finished", client, "it finished")
    stored = check_complete(frozen.root / run, COUNT)
    ended = "select status, stop_reason, failure_class, failure_code, max(run_s) as run_s,"
    ended += " count(*) as n from rollouts group by all"
    (outcome,) = rows(stored, ended)
    longest = outcome.pop("run_s")
    assert (outcome["status"], outcome["failure_class"]) == ("completed", ""), outcome
    with closing(sqlite3.connect(frozen.root / "control.db")) as log:
        sums = "SELECT sum(attempt - 1), sum(infra_failures), sum(worker_losses) FROM rollouts"
        sums += " WHERE run_id = ?"
        charges = log.execute(sums, (run,)).fetchone()
    print(f"{run}: attempts more, infrastructure failures, worker losses: {charges}")
    if who == EVERYTHING:
        assert charges[1:] == (0, 0)
        assert longest < RUN_S, "the stop is no part of what an attempt has spent"
