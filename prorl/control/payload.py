"""What every payload of a control row is: a frozen record that knows its `Kind`.

A request knows the record that answers it. On the wire a payload is a
JSON object with the field names below (`AttemptKey` and `Refusal` are arrays); a field that has its
default may be left out, a field that is not known here is refused. Ids are dense per run; seconds
are floats with `_s`; `at` is microseconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, or an id that counts from 0."""

Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""A policy version; -1 where nothing was sampled."""


class Kind(StrEnum):
    """What a control row says; the record with this `kind` tells who and with what."""

    HELLO = "hello"
    STARTED = "started"
    PROGRESS = "progress"
    FAILED = "failed"
    RELEASED = "released"
    LEAVING = "leaving"
    STATS = "stats"
    RESERVE = "reserve"
    COMMIT = "commit"
    PUBLISHED = "published"
    DISOWNED = "disowned"
    PROPOSE = "propose"
    HANDOUT = "handout"
    CURSOR = "cursor"
    FAILOVER = "failover"
    REPLY = "reply"
    WELCOME = "welcome"
    ENDPOINTS = "endpoints"
    CANCEL = "cancel"
    DRAIN = "drain"
    VERSION = "version"
    PAUSED = "paused"
    BACKENDS = "backends"
    RUN = "run"
    ROWS = "rows"
    TERMINAL = "terminal"
    GROUP_COMPLETE = "group_complete"
    STUCK = "stuck"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object with these fields and no others; those with their default are left out."""


class Payload(Record, frozen=True):
    """What a row of one kind carries."""

    kind: ClassVar[Kind]


ReplyT = TypeVar("ReplyT", bound=Payload)


class Request(Payload, Generic[ReplyT], frozen=True):
    """A payload that is answered by one `ReplyT`. Every request may be sent again."""

    reply: ClassVar[type[Payload]]
