"""Requests that real agents made, placed as the oracle of their study places them."""

from __future__ import annotations

import importlib.util
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import orjson
import pytest

from prorl.agents.capture import chat, messages, responses
from prorl.agents.capture.canonical import chain
from prorl.agents.capture.conversation_tree import Call, ConversationTree
from prorl.agents.sampler import Sampler
from prorl.testing import RENDERER, Replies, sampled
from prorl.types import Completion, Json, Message
from tests.capture.scripted_attempt import attempt

AGENTS = Path(__file__).parents[2] / "../shared/data/agents"
if not AGENTS.exists():
    pytest.skip("the recorded calls are not here (shared/data/agents)", allow_module_level=True)


class Recorded(NamedTuple):
    """One request, and what was said to it."""

    number: int
    body: dict[str, Json]
    reply: Json
    is_broken: bool
    """Whether the stream broke before its end."""


def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("match_probe", AGENTS / "match_probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded() -> Iterator[tuple[str, list[Recorded]]]:
    with tarfile.open(AGENTS / "logs.tar.xz") as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                rows = [orjson.loads(line) for line in file]
                replies = {row["n"]: row["reply"] for row in rows if "reply" in row}
                request_rows = [row for row in rows if row.get("n") in replies and "body" in row]
                drops = "-drop/" in member.name
                yield (
                    member.name.split("/")[0],
                    [
                        Recorded(row["n"], row["body"], replies[row["n"]], drops and not index)
                        for index, row in enumerate(request_rows)
                    ],
                )


def dialect(body: dict[str, Json]) -> ModuleType:
    if "input" in body:
        return responses
    return messages if "max_tokens" in body and "system" in body else chat


def recorded_reply(body: dict[str, Json], reply: Json) -> Message:
    if isinstance(reply, dict):
        return chat.parse({"messages": [reply]}).messages[0]
    if dialect(body) is responses:
        return responses.parse({"input": reply}).messages[0]
    return messages.parse({"messages": [{"role": "assistant", "content": reply}]}).messages[0]


def spoken(message: Message) -> Completion:
    """Returns the ids that a policy samples to say it: also a call that does not parse."""
    broken = {call.text: call for call in message.tool_calls if call.error}
    ids = RENDERER.completion(message)
    if not broken:
        return sampled(ids)
    text = RENDERER.tokenizer.decode(ids)
    for call in broken.values():
        text = text.replace(f'"name":"{call.name}","arguments":{{}}', f'"name":"{call.name}", {{')
    head, mark = text.removesuffix("<|im_end|>"), RENDERER.tokenizer.specials
    parts = re.split("(</?tool_call>)", head)
    tokens = [part for part in parts if part]
    made = [
        [mark[part]] if part in mark else RENDERER.tokenizer.encode(part).tolist()
        for part in tokens
    ]
    flat = [token for part in made for token in part] + [mark["<|im_end|>"]]
    return sampled(np.array(flat, dtype=np.int32))


class Player:
    """Plays a log against a conversation tree; ids of calls become ours."""

    def __init__(self) -> None:
        self.backend = Replies()
        self.sampler = Sampler(attempt(self.backend))
        self.tree = ConversationTree(attempt(self.backend), self.sampler)
        self.ids: list[dict[str, str]] = []

    def translated(self, body: dict[str, Json]) -> dict[str, Json]:
        """The body with our ids: by what an agent was told, turn by turn where ids repeat."""
        names = [name for turn in self.ids for name in turn]
        if len(set(names)) == len(names):
            text = orjson.dumps(body).decode()
            for turn in self.ids:
                for theirs, ours in turn.items():
                    text = text.replace(theirs, ours)
            body = orjson.loads(text)
            return body
        turns, of_turn = iter(self.ids), dict[str, str]()
        for message in body["messages"]:
            if message.get("tool_calls"):
                of_turn = next(turns)
                for call in message["tool_calls"]:
                    call["id"] = of_turn[call["id"]]
            elif "tool_call_id" in message:
                message["tool_call_id"] = of_turn[message["tool_call_id"]]
        return body

    async def play(self, exchange: Recorded) -> Call:
        request = dialect(exchange.body).parse(self.translated(exchange.body))
        expected_reply = recorded_reply(exchange.body, exchange.reply)
        call = await self.tree.call(request, chain(request.messages, request.tools), lambda: False)
        if call.reply is None:
            self.backend.replies.append(spoken(expected_reply))
        reply = await call.task
        call.delivered = not exchange.is_broken
        theirs = [call.id for call in expected_reply.tool_calls]
        ours = [call.id for call in reply.message.tool_calls]
        self.ids.append(dict(zip(theirs, ours, strict=True)))
        return call


async def test_recorded_calls_are_placed_as_the_oracle_says() -> None:
    probe, placed = oracle(), 0
    for name, log in recorded():
        player, seen, calls = Player(), list[tuple[int, list[Json], bytes]](), dict[int, Call]()
        for exchange in log:
            messages = probe.messages(exchange.body)
            tools = orjson.dumps(exchange.body.get("tools") or [], option=orjson.OPT_SORT_KEYS)
            again = [n for n, earlier, _ in seen if earlier == messages]
            replies = {row.number: row.reply for row in log}
            expected_parent = None
            for number, earlier, earlier_tools in sorted(
                seen, key=lambda row: (-len(row[1]), -row[0])
            ):
                if (
                    len(earlier) < len(messages)
                    and messages[: len(earlier)] == earlier
                    and not again
                ):
                    ours = probe.ours(replies[number])
                    if probe.level(ours, messages[len(earlier)]) not in ("gone", "rewritten"):
                        expected_parent = calls[number] if earlier_tools == tools else None
                        break
            call = await player.play(exchange)
            if again and log[0].is_broken:
                assert call is calls[again[-1]], name
            else:
                assert call.parent is expected_parent, (name, exchange.number)
                placed += expected_parent is not None
            seen.append((exchange.number, messages, tools))
            calls[exchange.number] = call
        await player.tree.close()
    assert placed == 145
