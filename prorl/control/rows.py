"""`ControlRow`: one event or command, its payload still as text, and its way to Arrow and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TypeVar

import msgspec
import pyarrow as pa

from prorl.control.payload import Kind, Payload
from prorl.control.workers import Hello
from prorl.errors import SchemaError
from prorl.schema import CONTROL, check_version
from prorl.types import AttemptKey

PayloadT = TypeVar("PayloadT", bound=Payload)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow:
    """One event or command; fields that a kind does not use keep their defaults.

    The payload is checked when it is read, so that rows that nobody reads cost nothing.
    """

    kind: Kind
    seq: int = 0
    re: int = 0
    run_id: str = ""
    rollout_id: int = -1
    group_id: int = -1
    attempt: int = -1
    stage: str = ""
    code: str = ""
    payload: str = "{}"
    """JSON of the kind's record."""

    @classmethod
    def of(
        cls,
        payload: Payload,
        *,
        seq: int = 0,
        re: int = 0,
        run_id: str = "",
        rollout_id: int = -1,
        group_id: int = -1,
        attempt: int = -1,
        stage: str = "",
        code: str = "",
    ) -> ControlRow:
        """A row that carries `payload`."""
        return cls(
            kind=payload.kind,
            seq=seq,
            re=re,
            run_id=run_id,
            rollout_id=rollout_id,
            group_id=group_id,
            attempt=attempt,
            stage=stage,
            code=code,
            payload=_encode(payload).decode(),
        )

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, self.rollout_id, self.attempt)

    def read(self, record: type[PayloadT]) -> PayloadT:
        """The payload. Raises SchemaError when it is not a `record`."""
        assert record.kind is self.kind, f"{record.__name__} of a {self.kind} row"
        try:
            found: PayloadT = _decoder(record).decode(self.payload)
            return found
        except msgspec.DecodeError as error:
            raise SchemaError(
                f"the payload of a {self.kind.value!r} row: {error}: {self.payload[:200]}",
                f"{record.__name__} with {', '.join(record.__struct_fields__) or 'no fields'}",
            ) from None

    def read_hello(self, where: str) -> Hello:
        """The payload of a `hello`.

        Raises SchemaError for a peer of another version, whatever else it says.
        """
        try:
            said = _versions.decode(self.payload)
        except msgspec.DecodeError:
            said = _Versioned()
        check_version(said.schema_version, where)
        return self.read(Hello)


class _Versioned(msgspec.Struct):
    """All that is read of a hello before its version is known."""

    schema_version: int | None = None


_versions = msgspec.json.Decoder(_Versioned)


@cache
def _decoder(record: type[PayloadT]) -> msgspec.json.Decoder[PayloadT]:
    return msgspec.json.Decoder(record)


_STRUCT = pa.struct(list(CONTROL))
_values = attrgetter(*CONTROL.names)


def to_batch(rows: Iterable[ControlRow]) -> pa.RecordBatch:
    values = pa.array([_values(row) for row in rows], _STRUCT)
    return pa.RecordBatch.from_arrays(values.flatten(), schema=CONTROL)


def from_batch(batch: pa.RecordBatch) -> list[ControlRow]:
    """Unpack a batch in order. Raises ValueError for an unknown kind."""
    columns = [column.to_pylist() for column in batch.columns]
    return [
        ControlRow(
            seq=seq,
            re=re,
            kind=Kind(kind),
            run_id=run_id,
            rollout_id=rollout_id,
            group_id=group_id,
            attempt=attempt,
            stage=stage,
            code=code,
            payload=payload,
        )
        for seq, re, kind, run_id, rollout_id, group_id, attempt, stage, code, payload in zip(
            *columns, strict=True
        )
    ]
