"""A run directory in an object store, over the real S3 protocol: conditional puts, reading by
commits, SQL, verify.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from prorl.errors import StorageError
from prorl.rows import row_hashes
from prorl.schema import SCHEMA_VERSION
from prorl.storage.catalog import StoredRun, query
from prorl.storage.convert import tables
from prorl.storage.durable import write_durably
from prorl.storage.layout import MANIFEST, RunDir
from prorl.storage.replay import stored_index
from prorl.storage.verify import verify
from prorl.storage.writer import RunWriter
from prorl.types import AttemptKey
from tests.grown import only
from tests.storage.control_log import FileLog
from tests.storage.rows import scored

moto_server = pytest.importorskip(
    "moto.server", reason="needs moto[server] (an S3 server in Python)"
)
s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket on a local S3 server."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("ENDPOINT_URL", f"http://{host}:{port}"),
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"runs-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


async def test_a_run_is_written_read_and_verified_in_s3(bucket: str, tmp_path: Path) -> None:
    run, log = RunDir(f"{bucket}/demo"), FileLog(tmp_path / "log.json")
    assert not run.local
    log.accept(*((i, 1) for i in range(8)))
    acked: list[int] = []
    writer = RunWriter(run, "demo", log, flush_s=0.01, flush_bytes=1 << 20)
    await writer.open(log.snapshot())
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


def test_a_put_that_came_through_is_success_and_a_second_writer_is_refused(bucket: str) -> None:
    run = RunDir(f"{bucket}/demo")
    write_durably(run.fs, run.path("commits", "a"), b"one")
    write_durably(run.fs, run.path("commits", "a"), b"one")
    with pytest.raises(StorageError, match="does another service write"):
        write_durably(run.fs, run.path("commits", "a"), b"two")
    assert run.fs.cat_file(run.path("commits", "a")) == b"one"
