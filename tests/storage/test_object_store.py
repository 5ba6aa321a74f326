"""A run directory in an object store, over the real S3 protocol: conditional puts, reading by
commits, SQL, verify.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from prorl.cli.app import dispatch
from prorl.config import ServiceConfig
from prorl.errors import ConfigError, ConflictError, StorageError
from prorl.schema.fields import SCHEMA_VERSION
from prorl.schema.rows import row_hashes
from prorl.service.core.manifest import claim_store
from prorl.storage.files.durable import check_conditional, write_durably
from prorl.storage.files.layout import MANIFEST, RunDir
from prorl.storage.files.objects import PAUSES_S, write_object
from prorl.storage.keep.compact import collect, compact, remove_dead
from prorl.storage.read.catalog import StoredRun, query
from prorl.storage.read.verify import verify
from prorl.storage.serve.replay import stored_index
from prorl.storage.write.convert import tables
from prorl.storage.write.writer import RunWriter
from prorl.types import AttemptKey
from tests.edge_rows import only
from tests.storage.compactable_run import content, run_of_many_parts
from tests.storage.control_log import FileLog
from tests.storage.s3_server import BUSY, CONFLICT, CUT, LOST, SILENT, FaultyS3
from tests.storage.scored_rows import scored

pytest.importorskip("moto.server", reason="needs moto[server] (an S3 server in Python)")
s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")


async def test_a_run_is_written_read_and_verified_in_s3(bucket: str, tmp_path: Path) -> None:
    run, log = RunDir(f"{bucket}/demo"), FileLog(tmp_path / "log.json")
    assert not run.local
    log.accept(*((i, 1) for i in range(8)))
    acked: list[int] = []
    writer = RunWriter(run, "demo", log, flush_s=0.01, flush_bytes=1 << 20)
    await writer.open(log.news())
    run.fs.pipe_file(
        run.path(MANIFEST), orjson.dumps({"run_id": "demo", "schema_version": SCHEMA_VERSION})
    )
    rows = [scored(i) for i in range(8)]
    for i, row in enumerate(rows):
        writer.add(AttemptKey("demo", i, 1), only(row), lambda i=i: acked.append(i))  # type: ignore[misc]
    writer.drain()
    await writer.run()
    assert sorted(acked) == list(range(8))
    assert verify(f"{bucket}/demo") == []
    assert query(f"{bucket}/demo", "select count(*) as n from sequences").to_pylist() == [{"n": 8}]
    index = stored_index(StoredRun(f"{bucket}/demo"))
    assert row_hashes(index.read(1)) == row_hashes(tables(pa.concat_batches(rows[4:]))["sequences"])
    damage(
        run,
        next(
            file.path for commit in run.commits() for file in commit.files if file.table == "turns"
        ),
    )
    assert any("its commit says" in str(finding) for finding in verify(f"{bucket}/demo"))


def damage(run: RunDir, path: str) -> None:
    """Flip one bit."""
    content = bytearray(run.fs.cat_file(run.path(path)))
    content[100] ^= 1
    run.fs.pipe_file(run.path(path), bytes(content))


def test_a_put_of_an_arrow_buffer_that_came_through_is_success(bucket: str) -> None:
    run = RunDir(bucket)
    for data in (bytes(range(256)), pa.py_buffer(bytes(range(256)))):
        write_object(run.fs, run.path("commits", "a"), data)
    with pytest.raises(StorageError, match="exists with other content"):
        write_object(run.fs, run.path("commits", "a"), pa.py_buffer(bytes(256)))


def test_a_put_that_came_through_is_success_and_a_second_writer_is_refused(bucket: str) -> None:
    run = RunDir(f"{bucket}/demo")
    write_durably(run.fs, run.path("commits", "a"), b"one")
    write_durably(run.fs, run.path("commits", "a"), b"one")
    with pytest.raises(StorageError, match="does another service write"):
        write_durably(run.fs, run.path("commits", "a"), b"two")
    assert run.fs.cat_file(run.path("commits", "a")) == b"one"


@pytest.mark.parametrize(
    "burst", [[BUSY] * 4, [CONFLICT] * 3, [LOST], [CUT], [BUSY, LOST, BUSY, CONFLICT, CUT]]
)
def test_a_put_outlasts_a_busy_server(bucket: str, faults: FaultyS3, burst: list[str]) -> None:
    run, waits = RunDir(f"{bucket}/demo"), list[float]()
    faults.faults = list(burst)
    write_object(run.fs, run.path("commits", "a"), b"one", sleep=waits.append)
    assert faults.faults == []
    assert run.fs.cat_file(run.path("commits", "a")) == b"one"
    with pytest.raises(StorageError, match="does another service write"):
        write_object(run.fs, run.path("commits", "a"), b"two", sleep=waits.append)


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_put_does_not_wait_for_ever(bucket: str, faults: FaultyS3, carried_out: bool) -> None:
    """The server takes the connection and says nothing: before the body, or after it."""
    run = RunDir(f"{bucket}/demo")
    if carried_out:
        faults.faults = [SILENT] * 2
        write_object(run.fs, run.path("commits", "a"), b"one", patience_s=0.5)
        assert run.fs.cat_file(run.path("commits", "a")) == b"one"
        return
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        fs = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True)
        with pytest.raises(StorageError, match="cannot store"):
            write_object(fs, "bucket/a", b"one", sleep=lambda _: None, patience_s=0.1)


def test_a_server_that_stays_busy_is_an_error(bucket: str, faults: FaultyS3) -> None:
    run, waits = RunDir(f"{bucket}/demo"), list[float]()
    faults.faults = [CONFLICT] * 100
    with pytest.raises(StorageError, match="cannot store"):
        write_object(run.fs, run.path("commits", "a"), b"one", sleep=waits.append)
    assert len(waits) == len(PAUSES_S)


class LastWriterWins(MemoryFileSystem):  # type: ignore[misc]
    """A store that takes "create" for "overwrite", as many did before S3 knew the condition."""

    def pipe_file(self, path: str, value: bytes, mode: str = "", **_: object) -> None:
        super().pipe_file(path, value)


def test_a_prefix_belongs_to_a_single_service(bucket: str, tmp_path: Path) -> None:
    config = ServiceConfig.model_validate({"root": tmp_path, "store": {"url": f"{bucket}/runs"}})
    for _ in range(2):
        claim_store(config, "first root")
    with pytest.raises(ConflictError, match="belongs to another service's root"):
        claim_store(config, "second root")


def test_a_store_without_conditional_puts_is_refused(bucket: str) -> None:
    run = RunDir(f"{bucket}/demo")
    check_conditional(run.fs, run.root)
    assert run.fs.find(run.root) == [], "the probe is gone"
    with pytest.raises(ConfigError, match="cannot hold runs"):
        check_conditional(LastWriterWins(), "/runs")


@pytest.mark.slow
def test_sql_over_missing_parts_is_an_error_without_a_wait(
    bucket: str, faults: FaultyS3, tmp_path: Path
) -> None:
    """Many scans begin while reads of others fail: Arrow must never wait for Python's lock then."""
    local = run_of_many_parts(tmp_path)
    run = RunDir(f"{bucket}/demo")
    run.fs.put(f"{local.root}/", f"{run.root}/", recursive=True)
    stored = StoredRun(run.where)
    for file in stored.files("rollouts"):
        run.fs.rm_file(run.path(file.path))
    with ThreadPoolExecutor(4) as threads:
        queries = [threads.submit(stored.sql, "select sum(reward) from rollouts") for _ in range(8)]
        for answer in queries:
            with pytest.raises(StorageError, match="is damaged: rollouts/part-"):
                answer.result(timeout=60)


@pytest.mark.slow
def test_compaction_in_s3_changes_no_row(bucket: str, tmp_path: Path) -> None:
    local = run_of_many_parts(tmp_path)
    run = RunDir(f"{bucket}/demo")
    run.fs.put(f"{local.root}/", f"{run.root}/", recursive=True)
    run.fs.invalidate_cache()
    assert content(run) == content(local)
    assert compact(run) is not None
    run.fs.pipe_file(run.path("turns", "pack-beside-0000.parquet"), b"about to be named")
    assert remove_dead(run) == [], "another host's compaction, perhaps: no lock tells"
    assert collect(run, grace_s=0) != []
    assert len(run.commit_names()) == 1
    assert content(run) == content(local)
    assert verify(run.where) == []


def test_a_run_lives_in_s3_as_it_does_on_a_disk(
    bucket: str,
    faults: FaultyS3,
    tmp_path: Path,
    sandbox_kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run, list, query, verify, compact, collect: by the commands, with faults on the way."""
    monkeypatch.chdir(tmp_path)
    rows = [{"task_id": f"t{i}", "env": "noop", "prompt": "x"} for i in range(3)]
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [
        "--tasks",
        "tasks.jsonl",
        "-n",
        "2",
        "--name",
        "r",
        "--quiet",
        "--set",
        "service.workers=0",
    ]
    sandbox = ["--set", f"service.sandbox.kind={sandbox_kind}"]
    faults.faults = [BUSY, CONFLICT]
    assert dispatch(["run", *flags, *sandbox, "--root", bucket]) == 0
    assert dispatch(["run", *flags, *sandbox, "--root", bucket]) == 2, "the name is taken"
    assert {path.name for path in Path("prorl-runs").iterdir()} == {bucket.replace("://", "-")}

    def output_of(*argv: str) -> str:
        capsys.readouterr()
        assert dispatch([*argv, "--root", bucket]) == 0
        return capsys.readouterr().out

    count = "select count(*) as n, count(distinct group_id) as g from rollouts"
    assert json.loads(output_of("sql", "r", count, "--json")) == [{"n": 6, "g": 3}]
    assert "are right" in output_of("verify", "r")
    assert [row["rollouts"] for row in json.loads(output_of("show", "--json"))] == [6]
    output_of("gc", "--grace-s", "0")
    assert json.loads(output_of("sql", "r", count, "--json")) == [{"n": 6, "g": 3}]
    assert "are right" in output_of("verify", "r")


QUESTIONS: dict[str, tuple[Callable[[RunDir], object], object]] = {
    "whether it is there": (lambda run: run.has("turns", "part"), True),
    "its size": (lambda run: run.size("turns", "part"), 4),
    "its bytes": (lambda run: run.read("turns", "part"), b"rows"),
    "a file": (lambda run: run.open("turns", "part").read(), b"rows"),
    "a folder": (lambda run: list(run.names("turns")), ["part"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_busy_store_is_retried_until_it_answers(
    bucket: str, faults: FaultyS3, question: str
) -> None:
    run = RunDir(f"{bucket}/demo")
    run.fs.pipe_file(run.path("turns", "part"), b"rows")
    run.fs.invalidate_cache()
    read, answer = QUESTIONS[question]
    faults.storm, faults.refusals = 1.0, [BUSY]
    threading.Timer(0.4, setattr, (faults, "storm", 0.0)).start()
    assert read(run) == answer
    assert sum(faults.struck.values()) > 0
    assert not run.has("turns", "nothing")
    with pytest.raises(FileNotFoundError):
        run.size("turns", "nothing")
