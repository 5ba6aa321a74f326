"""A journal that another node goes on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from prorl.columns import leased_batch, read_key
from prorl.journal import Journals, handed_path
from prorl.journal.attempt import MOVED_NOTE
from prorl.rows import Row
from prorl.types import Message, SandboxRef, ToolSpec
from tests.flight.rows import lease
from tests.grown import only, ready_row
from tests.journal.made import ENDED, answer, row, said


def _next(handed: int = 1, attempt: int = 2) -> Row:
    """The row of the attempt that goes on, with a sandbox of its own."""
    leased = dataclasses.replace(lease(1, attempt=attempt), on_unknown="tell", handed=handed)
    ready = ready_row(
        leased_batch([leased]),
        sandbox=SandboxRef(node_id="m", sandbox_id="t", socket_path="/t"),
        prompt=(Message(role="user", content="Go on."),),
        tools=(ToolSpec("bash", "A shell.", {}),),
        init_s=0.1,
    )
    return only(ready)


def _past(folder: Path) -> bytes:
    """A journal of two turns whose attempt was stopped."""
    journals = Journals(folder)
    journals.open()
    journals.expect(row())
    journals.settle()
    journal = journals.attempt(read_key(row()), on_unknown="tell")
    for turn in range(2):
        journal.say(said(turn))
        journal.tell(answer(turn))
    journal.end(ENDED)
    past = journals.past(read_key(row()))
    journals.close()
    return past


def _hand(folder: Path, past: bytes, taken: Row) -> Path:
    path = handed_path(folder, read_key(taken))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(past)
    return path


def test_another_node_goes_on_with_the_turns_and_tells_it_once(tmp_path: Path) -> None:
    past, taken = _past(tmp_path / "n1" / "run-0"), _next()
    folder = tmp_path / "n2" / "run-0"
    path = _hand(folder, past, taken)
    journals = Journals(folder)
    journals.open()
    journals.expect(taken)
    journals.settle()
    assert not path.exists()
    journal = journals.attempt(read_key(taken), on_unknown="tell", anew="a reason")
    assert journal.ended is None, "how it ended there is not how it ends here"
    assert journal.said(1) is not None
    assert journal.said(2) is None
    assert (journal.history.resumes, journal.history.anew) == (1, "")
    assert journal.seed_attempt(2) == 1
    assert not journal.begin(2, 0), "nothing can have begun here"
    assert journal.tell(answer(2)).startswith(MOVED_NOTE)
    assert MOVED_NOTE not in journal.tell(answer(3))
    journals.close()

    (recovered,) = Journals(folder).open()
    assert [type(record).__name__ for record in recovered.records] == [
        *("Said", "Answer", "Said", "Answer", "Moved", "Answer", "Answer")
    ]


def test_moved_twice_the_seeds_are_those_of_the_first(tmp_path: Path) -> None:
    past = _past(tmp_path / "n1" / "run-0")
    for node in (2, 3):
        taken, folder = _next(handed=node - 1, attempt=node), tmp_path / f"n{node}" / "run-0"
        _hand(folder, past, taken)
        journals = Journals(folder)
        journals.open()
        journals.expect(taken)
        journals.settle()
        past = journals.past(read_key(taken))
        journal = journals.attempt(read_key(taken), on_unknown="tell")
        assert (journal.history.resumes, journal.seed_attempt(node)) == (node - 1, 1)
        journals.close()


def test_lives_of_another_node_are_counted_once(tmp_path: Path) -> None:
    first = Journals(tmp_path / "n1" / "run-0")
    first.open()
    first.expect(row())
    first.attempt(read_key(row()), on_unknown="tell").say(said(0))
    first.close()
    (found,) = first.open()
    first.adopt(found, epoch=2)
    past, taken, folder = first.past(read_key(row())), _next(), tmp_path / "n2" / "run-0"
    first.close()
    _hand(folder, past, taken)
    journals = Journals(folder)
    journals.open()
    journals.expect(taken)
    assert journals.attempt(read_key(taken), on_unknown="tell").history.resumes == 3
    journals.close()
    (recovered,) = Journals(folder).open()
    assert recovered.epoch == 0


@pytest.mark.parametrize("damage", [b"", b"no journal at all", b"flip"])
def test_what_is_damaged_is_refused_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    past, taken = _past(tmp_path / "n1" / "run-0"), _next()
    if damage == b"flip":
        damage = past[:200] + bytes([past[200] ^ 1]) + past[201:]
    path = _hand(tmp_path / "n2" / "run-0", damage, taken)
    journals = Journals(tmp_path / "n2" / "run-0")
    journals.open()
    journals.expect(taken)
    journals.settle()
    assert "begins anew" in caplog.text
    assert not path.exists()
    journal = journals.attempt(read_key(taken), on_unknown="tell", anew="it did not arrive")
    assert journal.said(0) is None
    assert (journal.history.resumes, journal.history.anew) == (0, "it did not arrive")
    journals.close()


def test_nothing_is_handed_over_where_nothing_has_happened(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journals.open()
    assert journals.past(read_key(row())) == b""
    journals.expect(row())
    journals.settle()
    assert journals.past(read_key(row())) == b""
