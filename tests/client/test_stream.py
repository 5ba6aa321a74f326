"""Streams from a real replay endpoint: by mapped file and by DoGet, from any cursor, with bounds
and commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.analysis.synthetic_runs import write_run
from prorl.client import Client, PackedBatch, connect
from prorl.client.fetch import FlightSource
from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.flight.ticket import Ticket
from prorl.schema.rows import row_hashes
from tests.client.replay_process import served

NUM_GROUPS = 23
SHAPE = SyntheticShape(n=3, num_tokens=60, rewritten_share=0.3)


def groups() -> list[pa.RecordBatch]:
    return [group(i, SHAPE) for i in range(NUM_GROUPS)]


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "demo", groups(), "demo")
    with served(run_dir) as where:
        yield where


@pytest.fixture
def client(location: str) -> Iterator[Client]:
    with connect(location) as client:
        yield client


def hashes(batches: list[PackedBatch]) -> list[str]:
    return [digest for batch in batches for digest in row_hashes(batch.arrow)]


@pytest.mark.parametrize("host", [None, "", "another"])
def test_equal_rows_in_equal_order_on_every_path(location: str, host: str | None) -> None:
    source = FlightSource(location, host=host)
    fetched = source.fetch(Ticket(run="demo", cursor="demo@0"))
    batches = list(fetched.batches)
    again = source.fetch(Ticket(run="demo", cursor="demo@0", max_groups=2))
    assert (again.num_groups, again.cursor, again.end, again.mapped) == (
        2,
        "demo@2",
        False,
        host is None,
    )
    nothing = source.fetch(Ticket(run="demo", cursor=fetched.cursor))
    assert (nothing.num_groups, nothing.cursor, nothing.end, list(nothing.batches)) == (
        0,
        fetched.cursor,
        True,
        [],
    )
    source.close()
    assert fetched.mapped is (host is None), (
        "a file is mapped where the kernel is the same and nowhere else"
    )
    assert (fetched.cursor, fetched.end) == (f"demo@{NUM_GROUPS}", True)
    digests = [digest for batch in batches for digest in row_hashes(batch)]
    assert digests == row_hashes(delivered(groups()))
    for batch in batches:
        seqs = batch.column("delivery_seq").to_numpy()
        assert np.count_nonzero(np.diff(seqs)) + 1 == len(np.unique(seqs)), (
            "a batch holds whole groups"
        )


def test_mapped_tensors_are_the_files_own_pages(location: str) -> None:
    source = FlightSource(location)
    fetched = source.fetch(Ticket(run="demo", cursor="demo@0", max_groups=1))
    source.close()
    address = PackedBatch(next(fetched.batches), "demo").torch().token_ids.data_ptr()
    mapped = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".arrows")
    ]
    assert any(
        int(low, 16) <= address < int(high, 16)
        for low, high in (parts[0].split("-") for parts in mapped)
    )


def test_a_stream_goes_on_from_a_cursor(client: Client) -> None:
    whole = list(client.stream("demo", cursor="demo@0", groups_per_batch=5))
    assert [batch.num_groups for batch in whole] == [5, 5, 5, 5, 3]
    rest = list(client.stream("demo", cursor=whole[1].cursor, groups_per_batch=5))
    assert hashes(rest) == hashes(whole[2:])
    assert whole[0].advantages is not None


def test_bounds_change_the_fetches_and_not_the_rows(client: Client) -> None:
    whole = hashes(list(client.stream("demo", cursor="demo@0")))
    assert hashes(list(client.stream("demo", cursor="demo@0", max_groups=2))) == whole
    assert hashes(list(client.stream("demo", cursor="demo@0", max_bytes=1))) == whole


def test_commits_are_kept_per_consumer(client: Client) -> None:
    batch = next(client.stream("demo", "one", groups_per_batch=4))
    client.commit(batch, "one")
    assert next(client.stream("demo", "one", groups_per_batch=1)).delivery_seq[0] == 4
    assert next(client.stream("demo", "two", groups_per_batch=1)).delivery_seq[0] == 0


def test_wrong_cursors_runs_and_uses_say_so(client: Client) -> None:
    with pytest.raises(ConflictError, match="ahead"):
        next(client.stream("demo", cursor="demo@99"))
    with pytest.raises(ConflictError, match="belongs to run"):
        next(client.stream("demo", cursor="other@1"))
    with pytest.raises(NotFoundError, match="nope"):
        next(client.stream("nope"))
    with pytest.raises(UserError, match="RUN@SEQ"):
        next(client.stream("demo", cursor="12"))
    with pytest.raises(UserError, match="groups_per_batch 0"):
        client.stream("demo", groups_per_batch=0)
    with pytest.raises(UserError, match="is a replay"):
        client.submit("demo", [])


def test_a_stream_outlives_its_server(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", groups(), "demo")
    with served(run_dir) as where, connect(where) as client:
        batch = next(client.stream("demo", cursor="demo@0", groups_per_batch=NUM_GROUPS))
        pages = next(client.stream("demo", cursor="demo@0"))
    assert hashes([batch]) == row_hashes(delivered(groups()))
    assert hashes([pages]) == row_hashes(delivered(groups()[: pages.num_groups]))


def test_only_the_very_file_is_mapped(location: str) -> None:
    """Containers of one kernel share its boot id and may have another file at the same path."""
    source = FlightSource(location)
    plan, _ = source._plan(Ticket(run="demo", cursor="demo@0"))
    assert source._map(plan) is not None
    device, number = plan.inode
    assert source._map(replace(plan, inode=(device, number + 1))) is None
    assert source._map(replace(plan, inode=(0, 0))) is None


def test_a_consumer_that_committed_all_hears_how_to_read_it_again(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for batch in client.stream("demo", consumer="finished"):
        client.commit(batch, "finished")
    assert caplog.messages == []
    assert list(client.stream("demo", consumer="finished")) == []
    assert caplog.messages == [
        f"run demo has ended, and 'finished' committed all of it, up to demo@{NUM_GROUPS}:"
        " cursor='demo@0' reads it again"
    ]
