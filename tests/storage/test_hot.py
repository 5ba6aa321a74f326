"""The hot copy: bounded, mappable, disposable."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.analysis.synthetic import delivered
from prorl.schema import STREAM
from prorl.schema.rows import row_hashes
from prorl.storage.serve.hot import BLOCK_BYTES, FILES, HotCopy, Location
from prorl.storage.write.convert import tables
from tests.storage.scored_rows import scored


def read_location(place: Location) -> pa.RecordBatch:
    """Reads as a client on this host does."""
    with pa.memory_map(place.path) as source:
        source.seek(place.offset)
        return pa.ipc.read_record_batch(
            pa.ipc.read_message(source.read_buffer(place.length)), STREAM
        )


def sequences(group_id: int, width: int = 5) -> pa.RecordBatch:
    """The rows of a group of two."""
    rows = tables(pa.concat_batches([scored(2 * group_id + i, n=2, width=width) for i in range(2)]))
    return delivered([rows["sequences"]], first_seq=group_id)


def test_a_group_is_read_where_it_was_written(tmp_path: Path) -> None:
    hot = HotCopy(tmp_path / "hot", 1 << 20)
    places = [hot.write(("r", i), sequences(i, 5 + i)) for i in range(5)]
    assert len({place.path for place in places}) == 1
    for i, place in enumerate(places):
        assert hot.find(("r", i)) == place
        assert row_hashes(read_location(place)) == row_hashes(sequences(i, 5 + i))
        mine = hot.read(("r", i))
        assert mine is not None
        assert row_hashes(mine) == row_hashes(sequences(i, 5 + i))
        assert read_location(place).column("token_ids").values.buffers()[1].address % 8 == 0
    assert hot.find(("other", 0)) is None
    assert hot.read(("other", 0)) is None
    hot.close()
    hot.close()
    assert list(tmp_path.iterdir()) == []


def test_it_is_a_stream_that_any_arrow_reads(tmp_path: Path) -> None:
    hot = HotCopy(tmp_path / "hot", 1 << 20)
    place = [hot.write(("r", i), sequences(i)) for i in range(3)][-1]
    with pa.memory_map(place.path) as source:
        reader = pa.ipc.open_stream(source)
        batches = list(reader)
    assert [batch.column("group_id").to_pylist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    hot.close()


def test_files_grow_by_whole_blocks_of_zeros(tmp_path: Path) -> None:
    hot = HotCopy(tmp_path / "hot", FILES * 4 * BLOCK_BYTES)
    sizes = []
    for i in range(3):
        place = hot.write(("r", i), sequences(i, 30_000))
        content = Path(place.path).read_bytes()
        sizes.append(len(content) // BLOCK_BYTES)
        assert len(content) % BLOCK_BYTES == 0
        assert not any(content[place.offset + place.length :])
    assert sizes == [1, 2, 3]
    assert hot.num_bytes == 3 * BLOCK_BYTES
    hot.close()


def test_a_mapping_outlives_its_file(tmp_path: Path) -> None:
    hot = HotCopy(tmp_path / "hot", 40_000)
    first = hot.write(("r", 0), sequences(0, 100))
    mapped = read_location(first)
    for i in range(1, 40):
        hot.write(("r", i), sequences(i, 100))
    assert hot.find(("r", 0)) is None
    assert not Path(first.path).exists()
    assert row_hashes(mapped) == row_hashes(sequences(0, 100))
    hot.close()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_it_stays_within_its_budget_except_for_a_single_group(
    tmp_path_factory: object, widths: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("hot")  # type: ignore[attr-defined]
    budget = 60_000
    hot = HotCopy(directory / "hot", budget)
    largest = 0
    for i, width in enumerate(widths):
        batch = sequences(i, width)
        largest = max(largest, batch.nbytes)
        assert row_hashes(read_location(hot.write(("r", i), batch))) == row_hashes(batch)
        on_disk = sum(path.stat().st_size for path in (directory / "hot").iterdir())
        assert on_disk <= budget + largest + FILES * 4096 + 20_000
    hot.close()


def test_files_of_an_earlier_store_are_removed(tmp_path: Path) -> None:
    (tmp_path / "hot").mkdir()
    (tmp_path / "hot" / "000000.arrows").write_bytes(b"old")
    hot = HotCopy(tmp_path / "hot", 1 << 20)
    assert list((tmp_path / "hot").iterdir()) == []
    hot.close()
