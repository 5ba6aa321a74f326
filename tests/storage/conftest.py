"""A bucket on an S3 server of this host, for every test of the store that asks for one."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.storage.s3_server import FaultyS3


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Yields the faults of the S3 server for the next puts; botocore itself does not try again."""
    pytest.importorskip("moto.server", reason="needs moto[server] (an S3 server in Python)")
    s3fs = pytest.importorskip("s3fs", reason="needs the extra s3")
    from tests.storage.s3_server import s3_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as (endpoint, faulty):
        for name, value in (
            ("ENDPOINT_URL", endpoint),
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
            ("MAX_ATTEMPTS", "1"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield faulty
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(faults: FaultyS3) -> str:
    """URL of an empty bucket on a local S3 server."""
    import s3fs

    name = f"runs-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
