"""Which attempts of a leaving node go on elsewhere, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.columns import read_key
from prorl.errors import UnavailableError
from prorl.journal import AttemptJournal, Journals
from prorl.stages.moving import Moving
from prorl.types import AttemptKey
from tests.journal.made import answer, row, said

KEY = read_key(row())


class Gateway:
    """Writes down what it is given and told."""

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.given: list[tuple[bytes, bytes]] = []
        self.told: list[str] = []

    async def give(self, key: AttemptKey, journal: Path, workspace: Path | None) -> None:
        if not self.works:
            raise UnavailableError("nobody there")
        self.given.append((journal.read_bytes(), workspace.read_bytes() if workspace else b""))

    async def tell(self, key: AttemptKey, reason: str) -> None:
        self.told.append(reason)


class Box:
    """A sandbox whose workspace has a size."""

    def __init__(self, fits: bool = True) -> None:
        self.fits = fits

    async def snapshot(self, path: str, max_bytes: int) -> int:
        Path(path).write_bytes(b"files")
        return 5 if self.fits else 0


def begun(journals: Journals, on_unknown: str = "tell") -> AttemptJournal:
    """An attempt of one turn and one call."""
    journals.open()
    journals.expect(row())
    journals.settle()
    journal = journals.attempt(KEY, on_unknown=on_unknown)
    journal.say(said(0))
    journal.begin(0, 0)
    journal.tell(answer(0))
    return journal


async def moved(
    journals: Journals, journal: AttemptJournal, gateway: Gateway, box: Box | None
) -> None:
    moving = Moving(journals, gateway)  # type: ignore[arg-type]
    await moving.move(KEY, journal, box)  # type: ignore[arg-type]
    journals.close()


async def test_turns_and_workspace_are_given(tmp_path: Path) -> None:
    journals, gateway = Journals(tmp_path), Gateway()
    journal = begun(journals)
    past = journals.past(KEY)
    await moved(journals, journal, gateway, Box())
    assert (gateway.given, gateway.told) == ([(past, b"files")], [])


async def test_why_not(tmp_path: Path) -> None:
    async def reason(
        name: str, gateway: Gateway, box: Box | None, on_unknown: str = "tell", calls: bool = False
    ) -> list[str]:
        journals = Journals(tmp_path / name)
        journal = begun(journals, on_unknown)
        if calls:
            journal.begin(0, 1)
        await moved(journals, journal, gateway, box)
        assert gateway.given == []
        return gateway.told

    assert await reason("a", Gateway(), Box(fits=False)) == ["its workspace is larger than 256 MiB"]
    assert await reason("b", Gateway(), Box(), calls=True) == [
        "a tool call was under way for more than 5 s"
    ]
    assert await reason("c", Gateway(), Box(), "fail") == [
        "its shell would not have come along (on_unknown: fail)"
    ]
    assert await reason("d", Gateway(works=False), Box()) == [
        "it could not be handed over: nobody there"
    ]


@pytest.mark.parametrize("turns", [0, 1])
async def test_without_a_journal(tmp_path: Path, turns: int) -> None:
    """Whose attempt has not begun has nothing to lose, and says nothing."""
    gateway, journal = Gateway(), AttemptJournal()
    for turn in range(turns):
        journal.say(said(turn))
    await moved(Journals(tmp_path), journal, gateway, None)
    assert gateway.told == ["no journal was kept of it"] * turns
