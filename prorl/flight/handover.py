"""A node that leaves hands over what it has of an attempt; another goes on with it.

    node that leaves --give--> gateway: ROOT/handover/ROLLOUT.ATTEMPT.RUN.{journal,workspace}
    node with the next attempt <--take-- gateway

One message is one row of `HANDOVER`, answered by one; the last of a part brings the part's BLAKE2b
instead of data, and what does not fit it is refused. `journal` is the journal of turns as
`Journals.past` has it, `workspace` a tar as `Sandbox.snapshot` writes it, `anew` one line of text:
why there is neither (ROLLOUT.0.RUN.anew). Kept here until a later attempt has begun, or the rollout
is decided, also by the next gateway on the root; bounded by `limit_bytes` in all.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from prorl.errors import SchemaError, UnavailableError
from prorl.protocols import Accept, Channel, Network
from prorl.schema import HANDOVER
from prorl.types import AttemptKey, Json

PATH = "handover"
LIMIT_BYTES = 8 << 30
PIECE_BYTES = 1 << 20
ANEW = 400
"""Characters of a reason."""
JOURNAL, WORKSPACE = "journal", "workspace"
_PARTS = (JOURNAL, WORKSPACE)

log = logging.getLogger("prorl.flight")


def _message(
    key: AttemptKey, part: str, data: bytes = b"", *, last: bool = False
) -> pa.RecordBatch:
    values = [[key.run_id], [key.rollout_id], [key.attempt], [part], [last], [data]]
    arrays = [pa.array(v, f.type) for v, f in zip(values, HANDOVER, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=HANDOVER)


class _Heard:
    """One message."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows != 1:
            raise SchemaError(f"a handover message of {batch.num_rows} rows", "one row")
        (row,) = batch.to_pylist()
        self.key = AttemptKey(row["run_id"], row["rollout_id"], row["attempt"])
        self.part: str = row["part"]
        self.last: bool = row["last"]
        self.data: bytes = row["data"]


def _pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    """A file's content, then its digest."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digest.update(data)
            yield data, False
    yield digest.digest(), True


class _Written:
    """A part on its way in: a file that has its name once all of it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".tmp-{path.name}")
        self._file = self._temporary.open("wb")
        self._digest = blake2b(digest_size=16)
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        """The next piece."""
        self._digest.update(data)
        self.num_bytes += len(data)
        self._file.write(data)

    def finish(self, digest: bytes) -> None:
        """All is here. Raises SchemaError when it is not what was sent."""
        if digest != self._digest.digest():
            raise SchemaError(f"{self._path.name} does not fit its digest", "what was sent")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.replace(self._path)

    def close(self) -> None:
        """Forget what has no name yet; idempotent."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class Handovers:
    """What the gateway keeps. Belongs to the event loop."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._kept: dict[tuple[str, int], int] = {}
        """Attempt by rollout."""
        self._anew: dict[tuple[str, int], str] = {}
        self._num_bytes = 0

    def open(self) -> None:
        """Find what an earlier life kept; what it did not finish goes."""
        for path in self._folder.glob("*"):
            if path.suffix == ".anew" and not path.name.startswith(".tmp-"):
                rollout, _, run_id = path.stem.split(".", 2)
                self._anew[run_id, int(rollout)] = path.read_text(errors="replace")
                continue
            if not path.with_suffix(f".{JOURNAL}").exists() or path.name.startswith(".tmp-"):
                path.unlink(missing_ok=True)
                continue
            self._num_bytes += path.stat().st_size
            if path.suffix == f".{JOURNAL}":
                rollout, attempt, run_id = path.stem.split(".", 2)
                self._kept[run_id, int(rollout)] = int(attempt)

    @property
    def route(self) -> tuple[Accept, pa.Schema, pa.Schema]:
        """What `Network.listen` wants for `PATH`."""
        return self._serve, HANDOVER, HANDOVER

    def find(self, run_id: str, rollout_id: int) -> tuple[int, str]:
        """The attempt that was handed over, or 0, and why nothing was."""
        name = run_id, rollout_id
        attempt = self._kept.get(name, 0)
        return attempt, "" if attempt else self._anew.get(name, "")

    def prune(self, needed: Callable[[str, int, int], bool]) -> None:
        """Forget what nobody needs: by run, rollout and attempt."""
        for (run_id, rollout), attempt in list(self._kept.items()):
            if not needed(run_id, rollout, attempt):
                self._forget(AttemptKey(run_id, rollout, attempt))
        for run_id, rollout in list(self._anew):
            if not needed(run_id, rollout, 1 << 30):
                del self._anew[run_id, rollout]
                self._path(AttemptKey(run_id, rollout, 0), "anew").unlink(missing_ok=True)

    def _path(self, key: AttemptKey, part: str) -> Path:
        return self._folder / f"{key.rollout_id}.{key.attempt}.{key.run_id}.{part}"

    def _forget(self, key: AttemptKey) -> None:
        self._kept.pop((key.run_id, key.rollout_id), None)
        for part in _PARTS:
            path = self._path(key, part)
            if path.exists():
                self._num_bytes -= path.stat().st_size
                path.unlink()

    async def _serve(self, channel: Channel) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writing: dict[str, _Written] = {}
        try:
            while (batch := await channel.receive()) is not None:
                heard = _Heard(batch)
                if heard.part == "take":
                    await self._send(channel, heard.key)
                else:
                    await self._take_in(heard, writing)
                    channel.send(_message(heard.key, "ok"))
        finally:
            for written in writing.values():
                written.close()

    async def _take_in(self, heard: _Heard, writing: dict[str, _Written]) -> None:
        """A piece; the journal is the last part, and makes it count. Raises SchemaError."""
        if heard.part == "anew":
            self._begins_anew(heard)
            return
        if heard.part not in _PARTS or "/" in heard.key.run_id:
            raise SchemaError(f"part {heard.part!r} of {heard.key}", "journal, workspace or anew")
        if heard.part not in writing:
            writing[heard.part] = _Written(self._path(heard.key, heard.part))
        written = writing[heard.part]
        if not heard.last:
            if self._num_bytes + written.num_bytes + len(heard.data) > self._limit_bytes:
                raise SchemaError("no room for what is handed over", f"{self._limit_bytes} bytes")
            written.add(heard.data)
            return
        await asyncio.to_thread(written.finish, heard.data)
        writing.pop(heard.part).close()
        self._num_bytes += written.num_bytes
        if heard.part == JOURNAL:
            self._kept[heard.key.run_id, heard.key.rollout_id] = heard.key.attempt

    def _begins_anew(self, heard: _Heard) -> None:
        """Nothing can be kept of the attempt; what was said of why goes with its lease."""
        self._forget(heard.key)
        if "/" in heard.key.run_id:
            raise SchemaError(f"a reason of {heard.key}", "a run's name")
        reason = heard.data.decode("utf-8", "replace")[:ANEW]
        self._anew[heard.key.run_id, heard.key.rollout_id] = reason
        self._path(heard.key._replace(attempt=0), "anew").write_text(reason)

    async def _send(self, channel: Channel, key: AttemptKey) -> None:
        if self._kept.get((key.run_id, key.rollout_id)) == key.attempt:
            for part in _PARTS:
                path = self._path(key, part)
                for data, last in _pieces(path) if path.exists() else ():
                    channel.send(_message(key, part, data, last=last))
                    if await channel.receive() is None:
                        return
        channel.send(_message(key, "end"))


class Mover:
    """A node's side. Raises UnavailableError, SchemaError or OSError where it cannot be done."""

    def __init__(self, network: Network, location: str, hello: Mapping[str, Json]) -> None:
        self._network, self._location, self._hello = network, location, hello

    async def give(self, key: AttemptKey, journal: Path, workspace: Path | None) -> None:
        """Hand an attempt's past over; it is on the gateway's disk when this returns."""
        async with _Dialled(self) as channel:
            if workspace is not None:
                await self._give(channel, key, WORKSPACE, workspace)
            await self._give(channel, key, JOURNAL, journal)

    async def tell(self, key: AttemptKey, reason: str) -> None:
        """Why the next attempt begins anew."""
        async with _Dialled(self) as channel:
            await _asked(channel, _message(key, "anew", reason.encode()))

    async def _give(self, channel: Channel, key: AttemptKey, part: str, path: Path) -> None:
        for data, last in _pieces(path):
            await _asked(channel, _message(key, part, data, last=last))

    async def take(self, key: AttemptKey, journal: Path, workspace: Path) -> bool:
        """Fetch what was handed over; False when it is not there (any more)."""
        writing = {JOURNAL: _Written(journal), WORKSPACE: _Written(workspace)}
        try:
            async with _Dialled(self) as channel:
                batch = await _asked(channel, _message(key, "take"))
                while (heard := _Heard(batch)).part in writing:
                    if heard.last:
                        await asyncio.to_thread(writing[heard.part].finish, heard.data)
                    else:
                        writing[heard.part].add(heard.data)
                    batch = await _asked(channel, _message(key, "ok"))
        finally:
            for written in writing.values():
                written.close()
        return journal.exists()


class _Dialled:
    """A channel to the gateway for the length of a block."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    async def __aenter__(self) -> Channel:
        mover = self._mover
        self._channel = await mover._network.dial(
            mover._location, PATH, mover._hello, HANDOVER, HANDOVER
        )
        return self._channel

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()


async def _asked(channel: Channel, message: pa.RecordBatch) -> pa.RecordBatch:
    channel.send(message)
    batch = await channel.receive()
    if batch is None:
        raise UnavailableError("the gateway ended a handover")
    return batch
