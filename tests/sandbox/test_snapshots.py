"""Prepared workspaces: made once for siblings, whatever happens to whoever makes them, within a
budget of bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl.errors import TaskError
from prorl.protocols import Sandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.node.snapshots import Answer, Snapshots
from prorl.sandbox.prepared import Outcome
from prorl.sandbox.wire import encode, receive
from prorl.types import SandboxSpec
from tests.sandbox.conftest import Sandboxd, end, start_daemon

KEPT, GIVEN_UP, PLAIN = Outcome.KEPT, Outcome.GIVEN_UP, Outcome.PLAIN
SLOW = (
    "sleep 0.4; head -c16 /dev/urandom | base64 > token; mkdir -p src; echo 'print(1)' > src/a.py;"
    " chmod 755 src/a.py"
)


# ---- the rules, without a sandbox


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    made = Snapshots(tmp_path / "snapshots", 100)
    made.open()
    return made


async def _make(snapshots: Snapshots, key: str, num_bytes: int) -> Path:
    place = await snapshots.claim(f"maker of {key}", key)
    assert place.what == "make"
    Path(place.path).write_bytes(bytes(num_bytes))
    snapshots.settle(f"maker of {key}", KEPT)
    return Path(place.path)


async def _what(snapshots: Snapshots, key: str) -> str:
    place = await snapshots.claim("look", key)
    snapshots.settle("look", KEPT if place.what == "copy" else GIVEN_UP)
    return place.what


async def test_one_makes_and_the_others_wait_for_it(snapshots: Snapshots) -> None:
    first = await snapshots.claim("a", "key")
    others = [asyncio.create_task(snapshots.claim(name, "key")) for name in "bcd"]
    await asyncio.sleep(0.01)
    assert not any(other.done() for other in others)
    Path(first.path).write_bytes(b"tar")
    snapshots.settle("a", KEPT)
    assert {await other for other in others} == {Answer(first.path, "copy")}
    assert await _what(snapshots, "another key") == "make"


async def test_when_the_first_fails_the_next_makes_it_and_the_rest_go_on_waiting(
    snapshots: Snapshots,
) -> None:
    first = await snapshots.claim("a", "key")
    others = {name: asyncio.create_task(snapshots.claim(name, "key")) for name in "bc"}
    await asyncio.sleep(0.01)
    snapshots.settle("a", GIVEN_UP)
    done, waiting = await asyncio.wait(
        others.values(), timeout=0.05, return_when=asyncio.ALL_COMPLETED
    )
    assert len(done) == len(waiting) == 1
    place = done.pop().result()
    assert place.what == "make"
    assert place.path != first.path
    Path(place.path).write_bytes(b"tar")
    snapshots.settle(next(name for name, task in others.items() if task not in waiting), KEPT)
    assert (await waiting.pop()).what == "copy"


async def test_what_is_not_worth_keeping_holds_nobody_up(snapshots: Snapshots) -> None:
    await snapshots.claim("a", "key")
    waiting = asyncio.create_task(snapshots.claim("b", "key"))
    await asyncio.sleep(0)
    snapshots.settle("a", PLAIN)
    assert await waiting == Answer("", "plain")
    snapshots.settle("b", GIVEN_UP)
    assert await _what(snapshots, "key") == "plain"


async def test_a_claim_that_is_no_longer_wanted_is_withdrawn_before_and_after_its_answer(
    snapshots: Snapshots,
) -> None:
    await snapshots.claim("a", "key")
    waiting = asyncio.create_task(snapshots.claim("b", "key"))
    await asyncio.sleep(0)
    snapshots.settle("b", GIVEN_UP)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    snapshots.settle("a", GIVEN_UP)
    snapshots.settle("a", KEPT)
    assert await _what(snapshots, "key") == "make"


async def test_the_least_recently_used_go_and_what_is_in_use_stays(snapshots: Snapshots) -> None:
    files = {key: await _make(snapshots, key, 40) for key in "ab"}
    assert await _what(snapshots, "a") == "copy"
    in_use = await snapshots.claim("reader", "a")
    files["c"] = await _make(snapshots, "c", 40)
    assert {key for key, path in files.items() if path.exists()} == {"a", "c"}
    assert snapshots.num_bytes == 80
    await _make(snapshots, "d", 90)
    assert Path(in_use.path).exists()
    # all the rest went, the newest too: what is in use leaves no room
    assert snapshots.num_bytes == 40
    snapshots.settle("reader", KEPT)
    await _make(snapshots, "e", 90)
    assert [path.stat().st_size for path in (files["a"].parent).iterdir()] == [90]


async def test_a_snapshot_larger_than_everything_is_plain(snapshots: Snapshots) -> None:
    place = await snapshots.claim("a", "key")
    Path(place.path).write_bytes(bytes(101))
    snapshots.settle("a", KEPT)
    assert not Path(place.path).exists()
    assert await _what(snapshots, "key") == "plain"


# ---- through sandboxd


@pytest.fixture
async def daemon(folder: Path, sandbox_kind: str) -> AsyncIterator[Sandboxd]:
    started = await start_daemon(sandbox_kind, folder)
    yield started
    await end(started)
    assert not list(folder.glob("root/*/*"))


@asynccontextmanager
async def _fresh(host: UnixSandboxHost, number: int) -> AsyncIterator[Sandbox]:
    ref = await host.start(f"run/{number}/1", "run", SandboxSpec(tools=("bash",)))
    async with host.connect(ref) as sandbox:
        yield sandbox
    await host.stop(ref)


class Siblings:
    """Rollouts of one task; what each one's workspace held afterwards."""

    def __init__(self, host: UnixSandboxHost, command: str = "", key: str = "key") -> None:
        self._host, self._command, self._key = host, command, key
        self.num_works = 0
        self.failing = 0

    async def one(self, number: int) -> str:
        async with _fresh(self._host, number) as sandbox:

            async def work() -> None:
                self.num_works += 1
                if self._command:
                    await sandbox.exec(["bash", "-c", self._command], 20.0)
                if self.failing:
                    self.failing -= 1
                    raise TaskError("no setup")

            copied = await self._host.prepare(sandbox, self._key, work)
            found = await sandbox.exec(
                [
                    "bash",
                    "-c",
                    "cat token; python3 src/a.py; src/a.py 2>&1 | head -c 0; stat -c %a src/a.py",
                ],
                10.0,
            )
            return f"{'copied' if copied else 'worked'} {found.output}"


async def test_eight_siblings_prepare_once(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host, SLOW)
    found = await asyncio.gather(*(siblings.one(number) for number in range(8)))
    assert siblings.num_works == 1
    assert sorted(text.split()[0] for text in found) == ["copied"] * 7 + ["worked"]
    # one random token: the work ran once, wherever it is looked at
    assert len({tuple(text.split()[1:]) for text in found}) == 1
    assert found[0].split()[2:] == ["1", "755"]
    assert (await daemon.host.status())["snapshot_bytes"] > 0


async def test_the_failure_of_the_first_is_its_own(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host, SLOW)
    siblings.failing = 1
    found = await asyncio.gather(
        *(siblings.one(number) for number in range(4)), return_exceptions=True
    )
    assert sum(isinstance(text, TaskError) for text in found) == 1
    assert siblings.num_works == 2
    assert sorted(text.split()[0] for text in found if isinstance(text, str)) == [
        "copied",
        "copied",
        "worked",
    ]


async def test_quick_work_is_done_by_everybody(daemon: Sandboxd) -> None:
    siblings = Siblings(daemon.host)
    for number in range(3):
        assert (await siblings.one(number)).startswith("worked")
    assert siblings.num_works == 3
    assert (await daemon.host.status())["snapshot_bytes"] == 0


async def test_a_process_that_dies_leaves_its_claim_to_the_next(
    daemon: Sandboxd, folder: Path
) -> None:
    reader, writer = await asyncio.open_unix_connection(str(folder / "sd"))
    writer.write(encode({"op": "claim", "id": 1, "claim": "dead", "key": "key"}))
    frame = await receive(reader)
    assert frame is not None
    assert frame.header["what"] == "make"
    next_one = Siblings(daemon.host, SLOW)
    waiting = asyncio.create_task(next_one.one(1))
    await asyncio.sleep(0.5)
    assert next_one.num_works == 0
    writer.transport.abort()
    assert (await asyncio.wait_for(waiting, 20)).startswith("worked")


async def test_a_caller_that_gives_up_leaves_its_claim_to_the_next(daemon: Sandboxd) -> None:
    for number, leave in enumerate(("making", "waiting")):
        first = Siblings(daemon.host, "sleep 20", key=leave)
        maker = asyncio.create_task(first.one(100 + number))
        while not first.num_works:
            await asyncio.sleep(0.01)
        next_one = Siblings(daemon.host, SLOW, key=leave)
        waiting = asyncio.create_task(next_one.one(number))
        await asyncio.sleep(0.5)
        assert next_one.num_works == 0
        if leave == "waiting":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            waiting = asyncio.create_task(next_one.one(50))
        maker.cancel()
        assert (await asyncio.wait_for(waiting, 20)).startswith("worked")
        with pytest.raises(asyncio.CancelledError):
            await maker
