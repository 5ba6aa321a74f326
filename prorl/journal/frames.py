"""Sealed frames in an append-only file, and the longest prefix of them that is whole.

    "prj2" | u32 length | u32 seq | u8 kind | 3 zeros | u64 seal | u32 crc of the 24 bytes before |
    body

The seal is BLAKE2b of length, seq, kind and body. `seq` counts from 0, so that a frame that was
left out, doubled or moved is seen. A file that ends in the middle of a frame is normal: its writer
died in a write. Anything else that is not as it was written is damage, and is said.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

_HEAD = struct.Struct("<4sIIB3xQ")
_CRC = struct.Struct("<I")
_SEALED = struct.Struct("<IIB")
MAGIC = b"prj2"
HEAD_BYTES = _HEAD.size + _CRC.size
MAX_BODY_BYTES = 1 << 30


class JournalFrame(NamedTuple):
    kind: int
    body: memoryview


class Prefix(NamedTuple):
    """The frames of a file that are whole, from the first on."""

    frames: tuple[JournalFrame, ...]
    end: int
    """Bytes that they take."""
    damage: str
    """The fault at `end`; empty for a clean end, and for one in the middle of a write."""


def seal(kind: int, seq: int, body: bytes | memoryview) -> bytes:
    """The head of a frame; body follows it."""
    head = _HEAD.pack(MAGIC, len(body), seq, kind, _digest(kind, seq, body))
    return head + _CRC.pack(crc32(head))


def _digest(kind: int, seq: int, body: bytes | memoryview) -> int:
    digest = blake2b(_SEALED.pack(len(body), seq, kind), digest_size=8)
    digest.update(body)
    return int.from_bytes(digest.digest(), "little")


def read(data: bytes) -> Prefix:
    """The longest valid prefix of a file's bytes.

    >>> body = b"turn"
    >>> whole = seal(1, 0, body) + body
    >>> [frame.body.tobytes() for frame in read(whole + whole[:9]).frames]
    [b'turn']
    >>> read(whole[:-1] + b"N").damage
    'frame 0: its seal does not fit its content'
    """
    view, frames, at = memoryview(data), list[JournalFrame](), 0
    while True:
        head = data[at : at + HEAD_BYTES]
        if len(head) < HEAD_BYTES:
            cut = head[: len(MAGIC)] == MAGIC[: len(head)]
            return Prefix(tuple(frames), at, "" if cut else f"frame {len(frames)}: no frame at all")
        magic, length, seq, kind, digest = _HEAD.unpack_from(head)
        body = view[at + HEAD_BYTES : at + HEAD_BYTES + length]
        if problem := _problem(head, magic, length, seq, len(frames)):
            return Prefix(tuple(frames), at, f"frame {len(frames)}: {problem}")
        if len(body) < length:
            return Prefix(tuple(frames), at, "")
        if _digest(kind, seq, body) != digest:
            text = f"frame {len(frames)}: its seal does not fit its content"
            return Prefix(tuple(frames), at, text)
        frames.append(JournalFrame(kind, body))
        at += HEAD_BYTES + length


def _problem(head: bytes, magic: bytes, length: int, seq: int, expected: int) -> str:
    if magic != MAGIC or crc32(head[: _HEAD.size]) != _CRC.unpack_from(head, _HEAD.size)[0]:
        return "its head is damaged"
    if seq != expected:
        return f"it says that it is frame {seq}"
    return f"{length} bytes; the limit is {MAX_BODY_BYTES}" if length > MAX_BODY_BYTES else ""
