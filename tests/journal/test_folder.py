"""The journals of one worker: what was written comes back, damage is never silent."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from prorl.journal import AttemptEnd, AttemptJournal, Journals, RecordedCall, Recovered, ToolAnswer
from prorl.journal.records import JournalRecord
from prorl.schema.columns import read_key
from prorl.schema.rows import Row, row_hashes
from prorl.types import FinishReason
from tests.journal.journal_records import ENDED, answer, recorded_call, row, same

RECORDS: tuple[JournalRecord, ...] = (
    recorded_call(0),
    answer(0),
    answer(0, 1),
    recorded_call(1, FinishReason.LENGTH),
    ENDED,
)


def _write(folder: Path) -> Journals:
    journals = Journals(folder)
    assert journals.open() == []
    journals.begin(row())
    _record(journals.attempt(read_key(row()), on_lost_tool_call="report"))
    return journals


def _record(journal: AttemptJournal) -> None:
    for record in RECORDS:
        match record:
            case RecordedCall():
                journal.record_call(record)
            case ToolAnswer():
                journal.record_answer(record)
            case AttemptEnd():
                journal.record_end(record)


def _prefix(recovered: Recovered) -> int:
    """Returns how many records were recovered; they must be the first ones."""
    assert len(recovered.records) <= len(RECORDS)
    assert all(map(same, recovered.records, RECORDS))
    assert row_hashes(recovered.row.as_batch) == row_hashes(row().as_batch)
    return len(recovered.records)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    _write(tmp_path).close()
    (recovered,) = Journals(tmp_path).open()
    assert _prefix(recovered) == len(RECORDS)
    assert (recovered.key, recovered.resumes) == (read_key(row()), 0)


def test_an_attempt_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    journals = _write(tmp_path)
    assert journals.num_bytes > 0
    journals.drop(read_key(row()))
    assert journals.num_bytes == 0
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0, 0]
    journals.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_attempt_reuses_the_file_of_a_dropped_attempt(tmp_path: Path) -> None:
    journals = _write(tmp_path)
    journals.begin(row(2))
    assert len(list(tmp_path.glob("*.journal"))) == 2
    journals.drop(read_key(row()))
    journals.begin(row(3))
    journals.attempt(read_key(row(3)), on_lost_tool_call="report").record_call(recorded_call(0))
    assert len(list(tmp_path.glob("*.journal"))) == 2
    journals.drop(read_key(row(2)))  # its empty file is one that a killed worker leaves

    again = Journals(_as_killed(tmp_path))
    (recovered,) = again.open()
    assert (recovered.key, recovered.num_frames) == (read_key(row(3)), 2)
    assert len(list(tmp_path.glob("*.journal"))) == 1
    again.begin(row(4))
    assert len({path.name for path in tmp_path.glob("*.journal")} | {recovered.path.name}) == 2
    journals.close()


def _as_killed(folder: Path) -> Path:
    """The folder of a worker that has died: its lock is nobody's, its files are as they were."""
    (folder / "lock").unlink()
    return folder


def test_what_was_dropped_is_not_written_by_its_agent(tmp_path: Path) -> None:
    journals = _write(tmp_path)
    late = journals.attempt(read_key(row()), on_lost_tool_call="report")
    journals.drop(read_key(row()))
    journals.begin(row(2))
    late.record_call(recorded_call(5))
    journals.close()
    (recovered,) = Journals(tmp_path).open()
    assert (recovered.key, recovered.records) == (read_key(row(2)), ())


def test_cut_at_every_byte_the_longest_prefix_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "whole").close()
    (path,) = (tmp_path / "whole").glob("*.journal")
    whole, counts = path.read_bytes(), list[int]()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        journals = Journals(path.parent)
        recovered = journals.open()
        journals.close()
        counts.append(_prefix(recovered[0]) if recovered else -1)
    assert counts == sorted(counts)
    assert set(counts) == {-1, *range(len(RECORDS) + 1)}


def test_a_flip_of_any_byte_is_refused_aloud_or_reads_as_a_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path).close()
    (path,) = tmp_path.glob("*.journal")
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        caplog.clear()
        journals = Journals(tmp_path)
        with caplog.at_level(logging.WARNING, "prorl.journal"):
            recovered = journals.open()
        journals.close()
        assert not recovered, f"byte {place} was flipped and nobody saw it"
        assert "begins anew" in caplog.text
        assert not path.exists()


def test_a_restarted_worker_resumes_after_the_last_whole_record(tmp_path: Path) -> None:
    _write(tmp_path).close()
    (path,) = tmp_path.glob("*.journal")
    os.truncate(path, path.stat().st_size - 3)
    journals = Journals(tmp_path)
    (recovered,) = journals.open()
    assert _prefix(recovered) == len(RECORDS) - 1
    journals.adopt(recovered, resumes=4)
    journal = journals.attempt(recovered.key, on_lost_tool_call="report")
    assert journal.resumes == 4
    assert same(journal.recorded_call(0, b"") or recorded_call(9), recorded_call(0))
    journal.record_answer(answer(1))
    journals.close()
    (again,) = Journals(tmp_path).open()
    assert again.resumes == 4
    assert all(map(same, again.records, (*RECORDS[:-1], answer(1))))


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_past_that_cannot_be_written_on_is_still_the_past(
    tmp_path: Path, is_removed: bool
) -> None:
    _write(tmp_path).close()
    (path,) = tmp_path.glob("*.journal")
    journals = Journals(tmp_path, limit_bytes=path.stat().st_size)
    (recovered,) = journals.open()
    if is_removed:
        path.unlink()
    journals.adopt(recovered, resumes=4)
    assert (journals.num_bytes, list(tmp_path.glob("*.journal"))) == (0, [])
    journal = journals.attempt(recovered.key, on_lost_tool_call="report")
    assert journal.resumes == 4
    assert same(journal.recorded_call(0, b"") or recorded_call(9), recorded_call(0))


def test_who_is_refused_leaves_nothing(tmp_path: Path) -> None:
    _write(tmp_path).close()
    journals = Journals(tmp_path)
    (recovered,) = journals.open()
    journals.refuse(recovered)
    assert (journals.num_bytes, list(tmp_path.glob("*.journal"))) == (0, [])


def test_a_second_writer_of_a_folder_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _write(tmp_path)
    second = Journals(tmp_path)
    assert second.open() == []
    assert "another process" in caplog.text
    second.begin(row(2))
    assert len(list(tmp_path.glob("*.journal"))) == 1
    first.close()


def test_an_attempt_beyond_the_bound_loses_its_journal_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journals = Journals(tmp_path, limit_bytes=5000)
    journals.open()
    journals.begin(row())
    journal = journals.attempt(read_key(row()), on_lost_tool_call="report")
    for turn in range(20):
        journal.record_call(recorded_call(turn))
    assert journals.num_bytes == 0
    assert "without a journal" in caplog.text
    assert not list(tmp_path.glob("*.journal"))


@pytest.mark.parametrize(
    ("other", "files"),
    [
        (row(on_lost_tool_call=""), 0),
        (row(tools=False), 0),
        (row(tools=False, responds=True), 1),
    ],
    ids=["off", "no tools", "an env with turns"],
)
def test_where_nothing_is_worth_keeping_nothing_is_written(
    tmp_path: Path, other: Row, files: int
) -> None:
    journals = Journals(tmp_path)
    journals.open()
    journals.begin(other)
    assert len(list(tmp_path.glob("*.journal"))) == files


def test_with_sync_each_record_is_on_disk_before_what_comes_next(tmp_path: Path) -> None:
    synced: list[str] = []
    journals = Journals(tmp_path, sync=lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    journals.open()
    journals.begin(row())
    path = str(next(tmp_path.glob("*.journal")))
    assert synced == [path, str(tmp_path)]
    journal = journals.attempt(read_key(row()), on_lost_tool_call="report")
    journal.record_call(recorded_call(0))
    assert synced[2:] == [path]
    journal.record_answer(answer(0))
    assert synced[3:] == [path]


def test_a_disk_that_fails_costs_the_journal_and_not_the_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(fd: int) -> None:
        raise OSError("no more disk")

    journals = Journals(tmp_path, sync=fails)
    journals.open()
    journals.begin(row())
    assert "no more disk" in caplog.text
    assert not list(tmp_path.glob("*.journal"))
