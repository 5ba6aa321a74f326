"""Sends the figures of a run to the trackers that a team already has: TensorBoard, W&B, your own.

    follow(StoredRun(where), [open_tracker("tensorboard", run, folder)], ended)

It reads what is stored and runs in a process of its own (`prorl track`), never in a service. The
scalars are the curves of the viewer (`curves.py`): those of rollouts over the newest policy version
that sampled one of their tokens, those of the trainer over its step. A version is sent when a newer
one has a rollout or the run has ended, since until then its mean still moves. Each is sent once for
each process; a process that is started again sends what is stored again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prorl.analysis.curves import curves
from prorl.errors import UserError
from prorl.storage.read.catalog import StoredRun

VERSION, STEP = "policy_version", "trainer_step"
"""The axes of a scalar."""

NAMES = {
    "reward": "rollouts/reward",
    "length": "rollouts/sampled_tokens",
    "logprob": "rollouts/logprob",
    "tokens_s": "rollouts/tokens_per_second",
    "kept": "groups/kept_share",
    "staleness": "groups/staleness",
}
"""A curve's name -> the scalar's; `pass` gives `rollouts/pass@K`, a metric `trainer/NAME`."""

POLL_S = 10.0
"""Between two looks at a run. Each costs some tenths of a second of a core; a policy version takes
minutes.
"""


class Scalar(NamedTuple):
    name: str
    axis: str
    at: int
    value: float


class Tracker(Protocol):
    """Takes scalars. Another one is a class with these methods, named `module:Class`."""

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Scalars of one place on one axis; places of an axis ascend."""

    def close(self) -> None:
        """Everything is written."""


def scalars(stored: StoredRun) -> list[Scalar]:
    """Returns all scalars that a run has, each axis in ascending order."""

    def ask(sql: str) -> list[dict[str, Any]]:
        return list(stored.sql(sql).to_pylist())

    points = []
    for axis, curve_axis in ((VERSION, "newest"), (STEP, "step")):
        for curve in curves(curve_axis, ask):
            if bool(curve.get("logged")) != (axis == STEP):
                continue
            for row in curve["rows"]:
                name = _name(curve["name"], row)
                of_replay = axis == STEP and row["z"]
                if row["y"] is not None and not of_replay:
                    points.append(Scalar(name, axis, int(row["x"]), float(row["y"])))
    return sorted(points, key=lambda scalar: (scalar.axis, scalar.at, scalar.name))


def _name(curve: str, row: dict[str, Any]) -> str:
    if curve == "pass":
        return f"rollouts/{row['z']}"
    return NAMES.get(curve) or "trainer/" + curve.removeprefix("metric:")


def follow(
    where: str,
    trackers: Sequence[Tracker],
    ended: Callable[[], bool],
    wait: Callable[[float], object] = time.sleep,
) -> int:
    """Send a run's scalars, and new ones until `ended()`; returns how many were sent."""
    sent: set[tuple[str, str, int]] = set()
    while True:
        is_last = ended()  # asked before the look, so that nothing of the end is missed
        points = scalars(StoredRun(where))
        newest = max((scalar.at for scalar in points if scalar.axis == VERSION), default=-1)
        new = [
            scalar
            for scalar in points
            if scalar[:3] not in sent and (is_last or scalar.axis == STEP or scalar.at < newest)
        ]
        for group in _by_place(new):
            for tracker in trackers:
                tracker.write(group)
        sent |= {scalar[:3] for scalar in new}
        if is_last:
            return len(sent)
        wait(POLL_S)


def _by_place(points: Iterable[Scalar]) -> Iterator[list[Scalar]]:
    places: dict[tuple[str, int], list[Scalar]] = {}
    for scalar in points:
        places.setdefault((scalar.axis, scalar.at), []).append(scalar)
    yield from places.values()


class TensorBoard:
    """Event files in `FOLDER/RUN`, which TensorBoard reads; without torch or TensorFlow."""

    def __init__(self, run: StoredRun, folder: Path) -> None:
        writer = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _imported("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _imported("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(folder / run.run_id))

    def write(self, scalars: Sequence[Scalar]) -> None:
        values = [
            self._summary.Value(tag=scalar.name, simple_value=scalar.value) for scalar in scalars
        ]
        summary = self._summary(value=values)
        self._writer.add_event(
            self._event(wall_time=time.time(), step=scalars[0].at, summary=summary)
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of W&B under the same name. `WANDB_MODE=offline` keeps it in FOLDER for `wandb sync`;
    `WANDB_PROJECT` and its other variables are W&B's own.
    """

    def __init__(self, run: StoredRun, folder: Path) -> None:
        wandb = _imported("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        fields = ("run_id", "created_at", "backends", "renderer", "code_version")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "prorl"),
            id=run.run_id,
            name=run.run_id,
            resume="allow",
            dir=str(folder),
            config={name: run.manifest[name] for name in fields if name in run.manifest},
        )
        self._run.define_metric("trainer/*", step_metric=STEP)
        for names in ("rollouts/*", "groups/*"):
            self._run.define_metric(names, step_metric=VERSION)

    def write(self, scalars: Sequence[Scalar]) -> None:
        values = {scalar.name: scalar.value for scalar in scalars}
        self._run.log(values | {scalars[0].axis: scalars[0].at})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_tracker(name: str, run: StoredRun, folder: Path) -> Tracker:
    """Makes a tracker of `TRACKERS`, or `module:Class`, called as they are. Raises UserError."""
    if name in TRACKERS:
        return TRACKERS[name](run, folder)
    module, _, attribute = name.partition(":")
    try:
        tracker: Tracker = getattr(import_module(module), attribute)(run, folder)
    except (ImportError, AttributeError, ValueError) as error:
        names = ", ".join(TRACKERS)
        raise UserError(f"tracker {name!r}: {error}", f"{names}, or module:Class") from None
    return tracker


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"no package for {extra}: {error}", "it installed", f"pip install {extra}"
        ) from None
