"""`prorl bench repeat`: the newest demo's run, replayed into fresh trainers: are all bits equal?

Two trainers take 20 steps from the replay; a third is killed with SIGKILL at a random moment of a
random step and started again. Losses and parameters must be the same bits in all three, and the
losses those of the live training. Needs a finished `prorl demo`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow.dataset as ds

from prorl.bench.children import python
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.errors import UserError
from prorl.types import Json

ROOTS = (Path("prorl-runs"), Path("prorl-runs/learning"))
STEPS, QUICK_STEPS = 20, 4


class Trained(NamedTuple):
    """What a training left behind: its losses and its weights' hash."""

    losses: tuple[float, ...]
    weights: str
    """SHA-256 of the last checkpoint's parameters."""
    killed: str = ""
    """Where it was killed, in words."""


async def run(quick: bool) -> Report:
    """Replay, train three times, compare."""
    demo = _newest_demo()
    steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory(prefix="prorl-repeat-") as folder:
        async with _replay(demo) as replay:
            trainer = Trainer(_settings(demo, replay, steps), str(replay["token"]))
            one, other, killed = [
                await trainer.run(Path(folder) / name, name == "killed")
                for name in ("one", "other", "killed")
            ]
    same = _compared(demo, steps, one, other, killed)
    rows = tuple(
        Figure(what=what, value=float(equal), unit="1 = equal bits", note=note)
        for what, (equal, note) in same.items()
    )
    return Report(bench="repeat", machine=machine(), rows=rows)


def _settings(demo: Path, replay: dict[str, Json], steps: int) -> dict[str, Json]:
    """The settings of the demo's trainer, for one that learns from the replay."""
    settings: dict[str, Json] = json.loads((demo / "trainer.json").read_text())
    return settings | {"service": replay["location"], "steps": steps, "publish": False}


def _compared(
    demo: Path, steps: int, one: Trained, other: Trained, killed: Trained
) -> dict[str, tuple[bool, str]]:
    """Row -> whether the bits are equal, and of what."""
    live = _losses(demo / "training")[:steps]
    return {
        "losses_equal": (one.losses == other.losses, f"two fresh trainers, {steps} steps"),
        "parameters_equal": (one.weights == other.weights, f"SHA-256 {one.weights[:16]}"),
        "parameters_equal_after_kill": (
            one.weights == killed.weights and one.losses == killed.losses,
            killed.killed,
        ),
        "losses_equal_live": (
            one.losses == live,
            f"the training that `prorl demo` made: {demo.name}",
        ),
    }


def _newest_demo() -> Path:
    found = [
        path.parent
        for root in ROOTS
        for path in root.glob("*/trainer.json")
        if any((path.parent / "training").glob("metrics/*"))
    ]
    if not found:
        raise UserError("no demo in prorl-runs", "a finished one", "run `prorl demo` first")
    return max(found, key=lambda path: (path / "trainer.json").stat().st_mtime)


@asynccontextmanager
async def _replay(demo: Path) -> AsyncIterator[dict[str, Json]]:
    command = ("-m", "prorl.cli", "replay", demo.name, "--root", str(demo.parent), "--json")
    async with python(*command) as process:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readuntil(b"}"))


class Trainer:
    """Runs trainings as processes, all with the same settings."""

    def __init__(self, settings: dict[str, Json], token: str) -> None:
        self._settings = settings
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PRORL_TOKEN": token}

    async def run(self, output: Path, kill: bool) -> Trained:
        """One training; with `kill`, in two parts."""
        output.mkdir()
        (output / "trainer.json").write_text(
            json.dumps(self._settings | {"output": str(output), "consumer": output.name})
        )
        killed = await self._kill(output) if kill else ""
        process = await self._start(output)
        await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the trainer ended with {process.returncode}")
        newest = max((output / "checkpoints").glob("step-*"))
        digest = hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
        return Trained(_losses(output), digest, killed)

    async def _kill(self, output: Path) -> str:
        steps = int(self._settings["steps"])
        after, delay_s = random.randint(1, steps - 1), random.uniform(0, 1)
        process = await self._start(output)
        assert process.stdout is not None
        seen = 0
        while seen < after and (line := await process.stdout.readline()):
            seen += line.startswith(b"step ")
        await asyncio.sleep(delay_s)
        process.kill()
        await process.wait()
        return f"SIGKILL {delay_s:.2f} s after step {after} of {steps}, then started again"

    async def _start(self, output: Path) -> Process:
        command = ("-m", "prorl.trainer", "--config", str(output / "trainer.json"))
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=PIPE, env=self._environment
        )


def _losses(output: Path) -> tuple[float, ...]:
    files: Sequence[str] = sorted(str(path) for path in (output / "metrics").glob("step-*.parquet"))
    return tuple(ds.dataset(files).to_table().sort_by("step").column("loss").to_pylist())
