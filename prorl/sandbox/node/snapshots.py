"""Who prepares a workspace, and where its copy lies.

There is one maker per key at a time; everybody else waits for the outcome.

    claim(key) -> Answer(path, "make")   nobody has it: prepare, write a snapshot to it, settle
               -> Answer(path, "copy")   restore from the path, settle
               -> Answer("", "plain")    not worth keeping: prepare without a word

    settle(kept | given_up | plain)      a maker that gives up, or whose connection ends, leaves the
                                         key to the next who waits

Owned by sandboxd's loop; the files are written and read by its clients, which are of its own user
and host. The least recently used are removed when all together are larger than the limit; those in
use stay, so the limit is passed by at most them. Nothing survives sandboxd.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from prorl.sandbox.prepared import Outcome
from prorl.sandbox.trees import remove_tree

MAX_PLAIN = 4096
"""Keys remembered as not worth keeping."""


class Answer(NamedTuple):
    """What sandboxd answers to a claim."""

    path: str
    what: str
    """`make`, `copy` or `plain`."""


class _Snapshot:
    """A packed workspace on disk; `pins` are the claims that still copy it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.pins = 0


class _Claim(NamedTuple):
    """One answered claim that is not settled yet."""

    key: str
    snapshot: _Snapshot
    is_maker: bool


class Snapshots:
    """Who makes which snapshot, and which are kept."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._kept: OrderedDict[str, _Snapshot] = OrderedDict()
        self._plain: OrderedDict[str, None] = OrderedDict()
        self._making: dict[str, asyncio.Event] = {}
        self._claims: dict[str, _Claim] = {}
        self._waiting: dict[str, asyncio.Task[object]] = {}
        self._serial = itertools.count()
        self.num_bytes = 0

    def open(self) -> None:
        """Make an empty folder that sandboxes cannot enter."""
        self.close()
        self._folder.mkdir(mode=0o700, parents=True)

    def close(self) -> None:
        remove_tree(str(self._folder))

    async def claim(self, name: str, key: str) -> Answer:
        """The answer for a key, waiting while somebody makes it; `settle` will be told `name`."""
        # Wait while somebody makes it; `settle` of this name ends the wait.
        task = asyncio.current_task()
        assert task is not None
        self._waiting[name] = task
        try:
            while key in self._making:
                await self._making[key].wait()
        finally:
            del self._waiting[name]
        if key in self._plain:
            return Answer("", "plain")
        snapshot = self._kept.get(key)
        if snapshot is None:
            self._making[key] = asyncio.Event()
            snapshot = _Snapshot(self._folder / str(next(self._serial)))
            self._claims[name] = _Claim(key, snapshot, True)
            return Answer(str(snapshot.path), "make")
        self._kept.move_to_end(key)
        snapshot.pins += 1
        self._claims[name] = _Claim(key, snapshot, False)
        return Answer(str(snapshot.path), "copy")

    def settle(self, name: str, outcome: Outcome) -> None:
        """A claim came to its end, or is not wanted any more.

        Unknown names are no error: their claim was never answered.
        """
        if name in self._waiting:
            self._waiting[name].cancel()
        claim = self._claims.pop(name, None)
        if claim is None:
            return
        if claim.is_maker:
            self._made(claim, outcome)
            self._making.pop(claim.key).set()
        else:
            claim.snapshot.pins -= 1
        self._trim()

    def _made(self, claim: _Claim, outcome: Outcome) -> None:
        snapshot = claim.snapshot
        snapshot.num_bytes = _size(snapshot.path) if outcome is Outcome.KEPT else 0
        if 0 < snapshot.num_bytes <= self._limit_bytes:
            self.num_bytes += snapshot.num_bytes
            self._kept[claim.key] = snapshot
            return
        snapshot.path.unlink(missing_ok=True)
        if outcome is not Outcome.GIVEN_UP:
            self._plain[claim.key] = None
            while len(self._plain) > MAX_PLAIN:
                self._plain.popitem(last=False)

    def _trim(self) -> None:
        for key, snapshot in list(self._kept.items()):
            if self.num_bytes <= self._limit_bytes:
                return
            if not snapshot.pins:
                del self._kept[key]
                self.num_bytes -= snapshot.num_bytes
                snapshot.path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
