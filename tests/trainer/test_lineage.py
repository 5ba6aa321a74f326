"""Tests of the lineage of checkpoints: the run remembers what the trainer knows, whatever dies."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl.analysis.synthetic import group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import PackedBatch, connect
from prorl.errors import ProrlError
from prorl.schema import TRAINED
from prorl.storage.files.appended import AppendedTable
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun, query
from prorl.storage.read.verify import verify
from prorl.storage.write.lineage import ANCESTRY, append_recorded, read_recorded
from prorl.trainer.config import TrainerConfig
from prorl.trainer.learner import Learner
from prorl.trainer.lineage import SequenceOutcomes, weights_digest
from prorl.trainer.loop import train
from tests.client.replay_process import served
from tests.trainer.test_live import root
from tests.trainer.test_loop import model_dir, settings
from tests.trainer.tiny_model import SHAPE, save_model

__all__ = ["model_dir", "root"]

SORTED = "select * from trained order by step, delivery_seq, sequence_id"


def own_log(output: Path) -> pa.Table:
    files = sorted((output / "lineage").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path) for path in files])


def test_the_account_adds_up_to_the_step(model_dir: Path) -> None:
    groups = [group(i, SHAPE) for i in range(4)]
    seqs = np.repeat(np.arange(4), [rows.num_rows for rows in groups])
    rows = pa.concat_batches(groups).add_column(0, "delivery_seq", pa.array(seqs))
    batch = PackedBatch(rows, "demo").with_advantages(
        np.linspace(-1, 1, rows.num_rows, dtype=np.float32)
    )
    config = settings("grpc://nowhere", model_dir, Path("out"), minibatches=2)
    account = SequenceOutcomes(batch)
    figures = Learner(config, model_dir, resume=False).update(
        batch, step=9, version=0, account=account
    )
    assert account.trained_tokens_B.sum() == figures["trained_tokens"]
    assert account.loss_B.sum() / 2 == pytest.approx(figures["loss"], rel=1e-4, abs=1e-6)
    assert np.isfinite(account.logprobs_C).all()
    assert (account.logprobs_C < 0).all()


def test_a_replay_changes_nothing_and_the_trainer_keeps_its_own_log(
    model_dir: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "demo", [group(i, SHAPE) for i in range(9)], "demo")
    config = {"steps": 3, "lineage": "logprobs"}
    with served(run) as location:
        trainer_settings = settings(location, model_dir, tmp_path / "out", **config)
        with connect(location) as client:
            train(trainer_settings, client)
    assert AppendedTable(RunDir(run), "trained").pieces() == []
    rows = own_log(tmp_path / "out")
    assert rows.schema.equals(TRAINED)
    assert sorted(set(rows.column("step").to_pylist())) == [1, 2, 3]
    sampled = query(run, "select sequence_id, len(logprobs) as n from sequences").to_pylist()
    lengths = {row["sequence_id"]: row["n"] for row in sampled}
    for row in rows.to_pylist():
        assert len(row["learner_logprobs"]) == lengths[row["sequence_id"]]


def test_what_comes_in_is_checked(model_dir: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo", [group(i, SHAPE) for i in range(6)], "demo")
    with served(run) as location, connect(location) as client:
        config = settings(location, model_dir, tmp_path / "out", steps=2, checkpoint_steps=1)
        train(config, client)
    rows = own_log(tmp_path / "out")
    for bad in (rows, rows.drop_columns(["loss"]), rows.slice(0, 0)):
        with pytest.raises(ProrlError):
            read_recorded(_body(bad))
    first_step = rows.filter(pa.compute.equal(rows.column("step"), 1))
    recorded = read_recorded(_body(first_step))
    assert append_recorded(RunDir(run), recorded)
    assert not append_recorded(RunDir(run), recorded), "said again"
    for consumer, checkpoint in (("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c")):
        other = read_recorded(
            _body(_named(_named(first_step, "consumer", consumer), "checkpoint", checkpoint))
        )
        assert append_recorded(RunDir(run), other), "another consumer's, or another checkpoint"
    with pytest.raises(ProrlError, match="has delivered 2"):
        recorded.check(2)
    with pytest.raises(ProrlError, match="no Arrow stream"):
        read_recorded(b"nonsense")
    assert verify(run) == []


def _named(rows: pa.Table, column: str, name: str) -> pa.Table:
    place = rows.schema.get_field_index(column)
    names = pa.repeat(pa.scalar(name, pa.utf8()), rows.num_rows)
    return rows.set_column(place, rows.schema.field(place), names)


def _body(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    metadata = {**(rows.schema.metadata or {}), b"prorl.run": b"demo"}
    with pa.ipc.new_stream(sink, rows.schema.with_metadata(metadata)) as stream:
        stream.write_table(rows.replace_schema_metadata(metadata))
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_killed_three_times_the_run_remembers_what_the_trainer_did(
    root: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"task_id": f"t{i}", "env": "math", "prompt": f"{i} + 1?", "data": {"answer": str(i + 1)}}
        for i in range(7)
    ]
    tasks.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    config = TrainerConfig(
        service=str(root),
        run="live",
        model=save_model(tmp_path / "model", vocab_size=512, max_tokens=4096),
        output=tmp_path / "out",
        steps=8,
        groups_per_step=2,
        n=4,
        tasks=tasks,
        wait_s=1.0,
        keep_checkpoints=8,
        checkpoint_steps=2,
    )
    with connect(root) as client:
        client.create_run(run_id="live", filter="dapo", delivery="stream", epochs=1000)
    chance = random.Random(os.environ.get("PRORL_TEST_SEED", "11"))
    for kill_after in (1, 2, 1, None):
        _train(config, tmp_path / "trainer.json", kill_after, chance.uniform(0, 0.5))
    # The store goes on writing: what it writes at this moment has no name of its own yet.
    unnamed = shutil.ignore_patterns(".tmp-*")
    shutil.copytree(root / "live", tmp_path / "copy", ignore=unnamed)
    lineage = StoredRun(tmp_path / "copy").sql(SORTED)
    own = own_log(tmp_path / "out")
    assert lineage.to_pylist() == own.to_pylist()
    assert lineage.num_rows == 8 * 2 * 4, "each sequence once"
    assert sorted(set(lineage.column("step").to_pylist())) == list(range(1, 9))
    _check_checkpoints(lineage, tmp_path)
    findings = [str(finding) for finding in verify(tmp_path / "copy")]
    assert [text for text in findings if "is named by no commit" not in text] == [], (
        "but for a part that was being written while we copied"
    )


def _train(config: TrainerConfig, file: Path, kill_after: int | None, late_s: float) -> None:
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "prorl.trainer", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        steps = 0
        for line in process.stdout:
            steps += line.startswith("step")
            if steps == kill_after:
                time.sleep(late_s)
                process.send_signal(signal.SIGKILL)
        assert process.wait() == (0 if kill_after is None else -signal.SIGKILL)


def _check_checkpoints(lineage: pa.Table, tmp_path: Path) -> None:
    """Each is named by its weights, its parent is the one before, and the last one's ancestry is
    everything.
    """
    parents = [weights_digest(tmp_path / "model")]
    for path in sorted((tmp_path / "out" / "checkpoints").glob("step-*")):
        name = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
        step = int(path.name.removeprefix("step-"))
        rows = lineage.filter(pa.compute.equal(lineage.column("checkpoint"), name))
        assert set(rows.column("step").to_pylist()) == {step - 1, step}
        assert set(rows.column("parent_checkpoint").to_pylist()) == {parents[-1]}
        parents.append(name)
    last = StoredRun(tmp_path / "copy").sql(ANCESTRY.format(checkpoint=parents[-1]))
    assert last.num_rows == lineage.num_rows
