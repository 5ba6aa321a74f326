"""Errors across Flight: what crosses the wire, and what arrives.

They cross as a Flight error whose `extra_info` is JSON {"error": class name, "text": message};
server tracebacks never do. A class of `prorl.errors` arrives as that class; anything else as
`UnavailableError`.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.flight as fl

from prorl import errors
from prorl.errors import (
    ProrlError,
    SchemaError,
    UnauthorizedError,
    UnavailableError,
    UserError,
)

log = logging.getLogger("prorl.flight")

STREAM_ERRORS: tuple[type[BaseException], ...] = (fl.FlightError, pa.ArrowException, OSError)
"""The errors that a Flight stream raises when it breaks."""


STREAM_ENDS: tuple[type[BaseException], ...] = (StopIteration, *STREAM_ERRORS)
"""The errors that a reader raises when nothing more will come."""


REFUSALS: tuple[type[BaseException], ...] = (SchemaError, *STREAM_ERRORS)
"""The errors that can come while a stream opens."""


_TLS_CAUSES = (
    (
        "certificate has expired",
        "the service's certificate has expired: check the service's log",
    ),
    ("certificate signature failure", "it is not the service of this join file: another authority"),
    ("unable to get local issuer", "it is not the service of this join file: another authority"),
    ("self-signed certificate", "it is not the service of this join file: another authority"),
    ("is not in peer certificate", "its certificate is not one of a prorl service"),
    ("wrong version number", "no TLS is spoken there: is the port right?"),
    ("Socket closed", "TLS was asked of a plain port, or our certificate was refused"),
)
"""The texts of OpenSSL and gRPC, and what each means; the server's side of a refusal is never
told.
"""


def presentable(error: BaseException | None) -> ProrlError | None:
    """Our errors as they are; for any other an id that finds it in the log."""
    if error is None or isinstance(error, ProrlError):
        return error
    error_id = uuid.uuid4().hex[:8]
    log.error("internal error %s", error_id, exc_info=error)
    return UnavailableError(f"internal error {error_id}; the log of that process has it")


def to_flight(error: ProrlError) -> fl.FlightError:
    """The error as it crosses the wire: class and clear text, no traceback."""
    fields: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, UserError):
        fields["parts"] = [error.problem, error.expected, error.hint]
    return fl.FlightServerError(str(error), extra_info=orjson.dumps(fields))


def from_flight(error: BaseException, where: str) -> ProrlError:
    """The prorl error that the other end raised, or what its absence means."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        return _named(orjson.loads(extra), where)
    if isinstance(error, fl.FlightUnauthenticatedError):
        why = _first_words(str(error)).rpartition("message: ")[2]
        return UnauthorizedError(f"{where} refused the bearer token: {why}")
    return UnavailableError(f"{where}: {_first_words(str(error))}")


def _named(fields: Mapping[str, Any], where: str) -> ProrlError:
    kind = getattr(errors, str(fields.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, ProrlError)) or issubclass(
        kind, errors.RolloutError
    ):
        return UnavailableError(f"{where}: {fields.get('text')}")
    return (
        kind(*fields["parts"])
        if issubclass(kind, UserError)
        else kind(f"{where}: {fields.get('text')}")
    )


def _first_words(text: str) -> str:
    """Returns the meaning of TLS's words, else Flight's message without its gRPC debug tail."""
    for phrase, meaning in _TLS_CAUSES:
        if phrase in text:
            return meaning
    return re.split(r"\. gRPC client debug context|; Detail|\. Detail:", text, maxsplit=1)[0]
