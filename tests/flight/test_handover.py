"""What a leaving node gives away arrives as it was, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.errors import UnavailableError
from prorl.flight.handover import PATH, Handovers, Mover, _message
from prorl.schema import HANDOVER
from prorl.types import AttemptKey
from tests.flight.conftest import Net

KEY = AttemptKey("r.1", 7, 2)
BIG = bytes(range(256)) * 10_000


async def mover_of(net: Net, kept: Handovers) -> Mover:
    location = await net.network.listen(net.name("gateway"), {PATH: kept.route})
    return Mover(net.network, location, {"worker": "n1/run-0", "role": "run"})


def parts(tmp_path: Path, workspace: bytes = BIG) -> tuple[Path, Path]:
    journal, packed = tmp_path / "j", tmp_path / "w"
    journal.write_bytes(b"turns")
    packed.write_bytes(workspace)
    return journal, packed


async def test_what_is_given_is_taken_by_another(net: Net, tmp_path: Path) -> None:
    kept = Handovers(tmp_path / "kept")
    mover = await mover_of(net, kept)
    await mover.give(KEY, *parts(tmp_path))
    assert kept.find("r.1", 7) == (2, "")
    (tmp_path / "kept" / ".tmp-7.2.r.1.journal").write_bytes(b"torn")
    (tmp_path / "kept" / "8.1.r.1.workspace").write_bytes(b"no turns")
    again = Handovers(tmp_path / "kept")
    again.open()
    assert len(list((tmp_path / "kept").iterdir())) == 2, "what was not finished is gone"
    assert again.find("r.1", 7) == (2, ""), "a gateway that comes back knows it"
    journal, workspace = tmp_path / "to.journal", tmp_path / "to.workspace"
    assert await mover.take(KEY, journal, workspace)
    assert (journal.read_bytes(), workspace.read_bytes()) == (b"turns", BIG)
    kept.prune(lambda *_: True)
    assert kept.find("r.1", 7) == (2, "")
    kept.prune(lambda run_id, rollout, attempt: (run_id, rollout, attempt) != ("r.1", 7, 2))
    assert kept.find("r.1", 7) == (0, "")
    assert not list((tmp_path / "kept").iterdir())
    assert not await mover.take(KEY, tmp_path / "no.journal", tmp_path / "no.workspace")


async def test_why_nothing_was_given(net: Net, tmp_path: Path) -> None:
    kept = Handovers(tmp_path / "kept")
    mover = await mover_of(net, kept)
    await mover.give(KEY, *parts(tmp_path))
    await mover.tell(KEY, "too large")
    assert kept.find("r.1", 7) == (0, "too large")
    kept.prune(lambda *_: False)
    assert kept.find("r.1", 7) == (0, "")


async def test_more_than_the_bound_is_refused_and_leaves_nothing(net: Net, tmp_path: Path) -> None:
    kept = Handovers(tmp_path / "kept", limit_bytes=1000)
    mover = await mover_of(net, kept)
    with pytest.raises(UnavailableError):
        await mover.give(KEY, *parts(tmp_path))
    assert kept.find("r.1", 7) == (0, "")
    assert not list((tmp_path / "kept").iterdir())


async def test_what_changed_on_its_way_is_refused(net: Net, tmp_path: Path) -> None:
    kept = Handovers(tmp_path / "kept")
    location = await net.network.listen(net.name("gateway"), {PATH: kept.route})
    channel = await net.network.dial(location, PATH, {}, HANDOVER, HANDOVER)
    channel.send(_message(KEY, "journal", b"turns"))
    assert await channel.receive() is not None
    channel.send(_message(KEY, "journal", b"another digest", last=True))
    assert await channel.receive() is None
    assert kept.find("r.1", 7) == (0, "")
    await channel.close()


async def test_why_nothing_is_there_is_known_after_a_restart(net: Net, tmp_path: Path) -> None:
    kept = Handovers(tmp_path / "kept")
    await (await mover_of(net, kept)).tell(KEY, "a call was under way")
    later = Handovers(tmp_path / "kept")
    later.open()
    assert later.find("r.1", 7) == (0, "a call was under way")
    later.prune(lambda *_: False)
    assert later.find("r.1", 7) == (0, "")
    assert not list((tmp_path / "kept").iterdir())
