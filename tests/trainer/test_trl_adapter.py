"""TRL's own GRPOTrainer over a stored run: it trains the tokens that are ours to train, with our
advantages, and a killed training takes each group once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prorl.analysis.synthetic import group
from prorl.analysis.synthetic_runs import write_run
from prorl.client.records import Feed
from prorl.errors import NotFoundError
from prorl.trainer.adapters.trl import (
    PER_SEQUENCE,
    EndOfRunError,
    FeedRows,
    most_groups,
    row_of,
    scaled,
)
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner, expected_of
from tests.client.replay_process import served
from tests.trainer.tiny_model import SHAPE, batch_of, save_model
from tests.trainer.trl_script import words

GROUPS, ROWS = 6, 8
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainer.md").read_text()


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs") / "demo"
    with served(write_run(folder, [group(i, SHAPE) for i in range(GROUPS)], "demo")) as where:
        yield where


def test_a_row_keeps_what_trains_and_hides_what_does_not(location: str) -> None:
    for records in Feed(location, "demo", consumer="rows"):
        for record in records:
            row = row_of(record)
            lengths = {len(row[name]) for name in ("completion_ids", "logprobs", "env_mask")}
            assert len(lengths) == 1
            assert sum(row["env_mask"]) == int(record.mask.sum())
            assert row["prompt_ids"] + row["completion_ids"] == record.ids[
                : len(row["prompt_ids"]) + len(row["completion_ids"])
            ].tolist()  # fmt: skip


def test_a_cursor_waits_for_the_last_row_of_its_group(location: str) -> None:
    first = len(next(iter(Feed(location, "demo", consumer="x"))))
    rows = FeedRows(Feed(location, "demo", consumer="cursor"))
    rows.take(first - 1)
    assert rows.cursor is None
    rows.take(1)
    assert rows.cursor == "demo@1"


def test_the_last_rows_of_a_run_are_followed_by_copies_that_train_nothing(location: str) -> None:
    expected = [
        row for records in Feed(location, "demo", consumer="x") for row in map(row_of, records)
    ]
    rows, fed_rows, count = (
        FeedRows(Feed(location, "demo", consumer="whole")),
        [],
        len(expected) - 3,
    )
    for _ in range(2):
        fed_rows += rows.take(count)
    copies = fed_rows[len(expected) :]
    assert [row["completion_ids"] for row in fed_rows[: len(expected)]] == [
        row["completion_ids"] for row in expected
    ]
    assert len(copies) == count - 3
    assert not any(sum(row["env_mask"]) for row in copies)
    assert {row["prorl_weight"] for row in copies} == {0.0}
    assert rows.cursor == f"demo@{GROUPS}"
    with pytest.raises(EndOfRunError):
        rows.take(1)
    for loss in PER_SEQUENCE:  # a rollout counts once, whatever fills the batch
        batch = scaled([dict(row) for row in fed_rows[count:]], loss)
        plain = scaled([dict(row) for row in fed_rows[count : len(expected)]], loss)
        share = [row["prorl_advantage"] / len(batch) for row in batch[: len(plain)]]
        expected_share = [row["prorl_advantage"] / len(plain) for row in plain]
        assert share == pytest.approx(expected_share)


def test_the_number_of_steps_of_a_replay_is_available_beforehand(location: str) -> None:
    assert most_groups(Feed(location, "demo")) == GROUPS
    with pytest.raises(NotFoundError, match="no run 'other' in the replay: demo"):
        most_groups(Feed(location, "other"))


@pytest.mark.filterwarnings("ignore")
def test_a_replay_is_trained_whole_by_the_pages_script(location: str, tmp_path: Path) -> None:
    """`train_trl` as docs/trainer.md starts it; started again it has nothing to do."""
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    model = save_model(tmp_path / "model")
    words().save_pretrained(model)
    (line,) = re.findall(r"-m (prorl\S+train_trl) MODEL ROOT RUN OUTPUT", PAGE)
    script = [sys.executable, "-m", line, str(model), location, "demo", str(tmp_path / "out")]
    options = ["--cpu", "--groups", "4", "-n", str(SHAPE.n), "--rows", "4"]

    def started(steps: int) -> str:
        done = subprocess.run(
            [*script, *options, "--steps", str(steps)],
            env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    first = started(1)
    assert "steps    1: 6 groups, 4 a step, with --steps 1" in first
    assert "trained  1 step" in first
    rest = started(99)
    assert "1 are done" in rest
    last = int(re.findall(r"trained  (\d+) steps", rest)[0])
    state = tmp_path / "out" / f"checkpoint-{last}" / "prorl.json"
    assert json.loads(state.read_bytes())["cursor"] == f"demo@{GROUPS}"
    assert "trained" not in started(last)


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_our_tokens_and_goes_on_behind_its_checkpoint(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    from tests.trainer.trl_script import make

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model = save_model(tmp_path / "model")
    seen: list[dict[str, Any]] = []
    trainer = make(Feed(location, "demo", consumer="trl"), model, tmp_path / "out", 2, ROWS, seen)
    trainer.train()
    assert len(seen) == 2
    reference = FeedRows(Feed(location, "demo", consumer="same"))
    for batch in seen:
        rows = reference.take(ROWS)
        assert int((batch["tool_mask"] * batch["completion_mask"]).sum()) == sum(
            sum(row["env_mask"]) for row in rows
        )
        torch.testing.assert_close(
            batch["advantages"].double(),
            torch.tensor([row["prorl_advantage"] for row in rows]).double(),
        )
        assert batch["old_per_token_logps"] is batch["sampling_per_token_logps"]
    resumed: list[dict[str, Any]] = []
    again = make(Feed(location, "demo", consumer="trl"), model, tmp_path / "out", 3, ROWS, resumed)
    again.train(resume_from_checkpoint=True)
    assert len(resumed) == 1
    state = tmp_path / "out" / "checkpoint-2" / "prorl.json"
    cursor = json.loads(state.read_bytes())["cursor"]
    restored = FeedRows(Feed(location, "demo", consumer="same", cursor=cursor))
    assert int((resumed[0]["tool_mask"] * resumed[0]["completion_mask"]).sum()) == sum(
        sum(row["env_mask"]) for row in restored.take(ROWS)
    )


@pytest.mark.filterwarnings("ignore")
def test_the_first_loss_of_trl_is_ours_over_the_same_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    from tests.trainer.trl_script import make

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    shape = replace(SHAPE, rewritten_share=0.0)
    model = save_model(tmp_path / "model")
    losses: list[float] = []
    seen: list[dict[str, Any]] = []
    run = write_run(tmp_path / "same", [group(i, shape) for i in range(2)], "same")
    with served(run) as where:
        feed = Feed(where, "same", consumer="trl")
        trainer = make(feed, model, tmp_path / "out", 1, 2 * shape.n, seen)
        compute = trainer._compute_loss

        def watched(*arguments: Any) -> Any:
            loss = compute(*arguments)
            losses.append(float(loss))
            return loss

        trainer._compute_loss = watched
        trainer.train()
    config = TrainerConfig(
        service="unused",
        run="same",
        model=model,
        output=tmp_path / "ours",
        steps=1,
        clip_high=0.2,  # what TRL has by itself, without dual clip
        dual_clip=1e30,
    )
    ours = Learner(config, model, resume=False).update(batch_of(2, shape), step=0, version=0)
    assert int((seen[0]["tool_mask"] * seen[0]["completion_mask"]).sum()) == ours["trained_tokens"]
    assert losses == [pytest.approx(ours["loss"], rel=1e-4)]


def test_what_trl_saves_is_published_untied_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM

    from prorl.trainer.adapters import train_trl

    class Recorder:
        """Records the commands to a client, in the order of the calls."""

        def __init__(self) -> None:
            self.published: list[tuple[Path, dict[str, Any]]] = []

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def publish(self, run: str, version: int, path: Path, *, expected: dict[str, Any]) -> None:
            self.published.append((path, expected))

    client = Recorder()
    monkeypatch.setattr(train_trl, "connect", lambda url: client)
    model: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model"))
    model.train()
    feed: Any = SimpleNamespace(url="http://h:1", run="r")
    serve = train_trl.Serve(feed)
    args = SimpleNamespace(output_dir=str(tmp_path), fsdp=[], deepspeed=None)
    for step in (1, 2, 3):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").touch()
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        serve.on_save(args, state, None, model=model)
        path, expected = client.published[-1]
        untied: Any = AutoModelForCausalLM.from_pretrained(path)
        assert not untied.config.tie_word_embeddings
        assert not (path / "optimizer.pt").exists()
        own = expected_of(untied.eval())
        assert own["ids"] == expected["ids"]
        assert own["logprobs"] == pytest.approx(expected["logprobs"])
        assert model.training, "asking it changes nothing"
    kept = sorted(path.name for path in (tmp_path / "untied").iterdir())
    assert kept == ["checkpoint-2", "checkpoint-3"], "servers may still read the one before"
