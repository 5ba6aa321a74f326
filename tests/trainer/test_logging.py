"""Tests that the logs of other trainers are stored with the run under our names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from prorl.client.records import Feed
from prorl.trainer.adapters import metrics_callback
from prorl.trainer.adapters.skyrl import SkyRLTracker
from prorl.trainer.adapters.verl import StepsFile


class Recorder(Feed):
    """A feed that keeps what is logged instead of sending it."""

    def __init__(self) -> None:
        super().__init__("nowhere", "r")
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Any, version: int | None = None) -> None:
        self.logged.append((step, dict(values)))


def test_trl_logs_each_step_and_not_its_summary() -> None:
    pytest.importorskip("transformers", reason="no transformers: the extra `torch`")
    feed, waited = Recorder(), [0.0]
    callback = metrics_callback(feed, lambda: waited[0])
    first = SimpleNamespace(is_world_process_zero=True, global_step=4)
    other = SimpleNamespace(is_world_process_zero=False, global_step=4)
    callback.on_log(None, first, None, logs={"loss": 0.5, "kl": 0.1, "note": "x", "done": True})
    callback.on_log(None, other, None, logs={"loss": 9.0})
    callback.on_log(None, first, None, logs={"train_loss": 0.5, "train_runtime": 3.0})
    ((step, values),) = feed.logged
    assert step == 4
    assert values == {"loss": 0.5, "kl": 0.1, "idle_share": 0.0}
    waited[0] = 1e9
    callback.on_log(None, first, None, logs={"loss": 0.5})
    assert feed.logged[-1][1]["idle_share"] > 1, "of the time since the step before"


def test_verl_writes_lines_and_each_is_sent_once(tmp_path: Path) -> None:
    feed, path = Recorder(), tmp_path / "steps.jsonl"
    steps = StepsFile(path, feed)
    steps.send()
    line = {"step": 1, "data": {"actor/pg_loss": 0.5, "actor/ppo_kl": 0.1, "timing_s/gen": 2.0}}
    path.write_bytes(orjson.dumps(line) + b'\n{"step": 2, "da')
    steps.send()
    steps.send()
    assert feed.logged == [(1, {"loss": 0.5, "kl": 0.1, "timing_s/gen": 2.0})]
    with path.open("ab") as file:
        file.write(b'ta": {"actor/entropy": 1.5}}\n')
    steps.send()
    assert feed.logged[1:] == [(2, {"entropy": 1.5})]


def test_skyrl_tracks_as_before_and_with_the_run() -> None:
    feed, seen = Recorder(), list[object]()
    theirs = SimpleNamespace(
        log=lambda data, step, commit=False: seen.append((data, step, commit)),
        finish=lambda: seen.append("finished"),
    )
    tracker = SkyRLTracker(theirs, feed)
    tracker.log({"policy/raw_grad_norm": 0.5}, step=3, commit=True)
    tracker.finish()
    assert seen == [({"policy/raw_grad_norm": 0.5}, 3, True), "finished"]
    assert feed.logged == [(3, {"grad_norm": 0.5})]
