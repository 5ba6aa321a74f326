"""Reads a client's request as a conversation: on the loop where it is small, else in a helper.

    incoming = await read("/chat/completions", body, rank=0.0)    # Raises RefusedError

Whoever sends it is not trusted, so what reading may cost is bounded: bytes by the caller, the
processor's time of a helper here, and what comes back from it by `canonical.check_size`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from prorl.agents.capture import chat, gemini, messages, responses
from prorl.agents.capture.canonical import (
    ConversationRequest,
    RefusedError,
    Reply,
    chain,
    check_size,
    load_json,
    read_object,
)
from prorl.errors import RolloutError, UserError
from prorl.helper.child import Answer, serve
from prorl.helper.pool import pool
from prorl.helper.process import Died, HelperError, HelperProgram
from prorl.types import FailureCode, Json

LIGHT_BYTES = 16 << 10
"""Read on the loop: a few milliseconds of it, however it is written."""
PROGRAM = HelperProgram(
    __spec__.name, wall_s=60.0, cpu_s=10.0, memory_bytes=1 << 30, most=2, nice=10
)


class Dialect(Protocol):
    """A module or an object that reads and writes one API."""

    @property
    def KEEP_ALIVE(self) -> bytes:
        """Returns what is written into a stream whose reply is not there yet."""

    def parse(self, body: dict[str, Json]) -> ConversationRequest:
        """Parses a request. Raises RefusedError."""

    def answer(self, conversation: ConversationRequest, reply: Reply) -> Json:
        """The whole answer."""

    def events(self, conversation: ConversationRequest, reply: Reply) -> Iterator[bytes]:
        """The same as a stream."""

    def error(self, kind: str, message: str) -> Json:
        """Body of an answer that is none."""

    def failed(self, kind: str, message: str) -> bytes:
        """Event that ends a stream which had begun."""


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "/chat/completions": chat,
        "/responses": responses,
        "/messages": messages,
        ":generateContent": gemini.WHOLE,
        ":streamGenerateContent": gemini.STREAM,
    }
)
"""The dialects, by how the address of a request ends."""
COUNTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/messages/count_tokens": ("/messages", "input_tokens"),
        ":countTokens": (":generateContent", "totalTokens"),
    }
)
"""Requests for the length of a prompt: the request that has it, and the field of the answer."""


class Incoming(NamedTuple):
    conversation: ConversationRequest
    digests: list[bytes]
    """`chain` of it."""


async def read(path: str, body: bytes, rank: float) -> Incoming:
    """The conversation that a request of a dialect holds; of those that wait the lowest `rank`
    comes first. Raises RefusedError, and RolloutError where no helper can be had.
    """
    if len(body) <= LIGHT_BYTES:
        return read_here(path, body)
    try:
        sent = await (await pool(PROGRAM)).ask((path, body), label="reading a request", rank=rank)
    except UserError as error:
        raise RefusedError(error.problem, error.expected, error.hint) from None
    except HelperError as error:
        if isinstance(error, Died) and error.was_killed:
            raise RolloutError(FailureCode.STAGE_ERROR, str(error)) from None
        raise RefusedError(f"a body that cannot be read: {error}", "a shorter request") from None
    return msgspec.convert(sent, Incoming)


def read_here(path: str, body: bytes) -> Incoming:
    """Raises RefusedError."""
    try:
        value = load_json(body)
    except ValueError as cause:
        raise RefusedError(f"the body is no JSON: {cause}", "a JSON object") from None
    conversation = DIALECTS[path].parse(read_object(value, "the body"))
    check_size(conversation)
    return Incoming(conversation, chain(conversation.messages, conversation.tools))


def prepare() -> Answer:
    return _answer


def _answer(question: tuple[str, bytes]) -> Incoming:
    try:
        return read_here(*question)
    except RefusedError as error:  # any other class would end the helper
        raise UserError(error.problem, error.expected, error.hint) from None


if __name__ == "__main__":
    serve(prepare)
