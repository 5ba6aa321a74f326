"""What an agent does when a tool's output does not fit.

It stops, drops old outputs, or lets the policy sum up:

    prorl run ... --set run.agent=native-drop    # or native, native-summary

What a strategy returns is rendered anew and starts a segment; the segments before it stay as they
were sampled and train. Yours is an agent: an entry point of `prorl.agents` that gives
`NativeAgent(your_strategy)`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from prorl.types import Message

DROPPED = "[output dropped: the context is full]"
ASK = (
    "The context is full. Sum up what you have done and found so far, and what is left to do, for"
    " yourself to go on from. Do not call tools now."
)
SUMMARY = "Your work so far, as you summed it up:\n"


class Room(NamedTuple):
    """What a strategy may ask of the agent."""

    fits: Callable[[Sequence[Message]], bool]
    """Whether a conversation leaves room to go on."""
    ask: Callable[[Sequence[Message]], Awaitable[str]]
    """The policy's answer to a conversation: a turn in a segment of its own, which trains."""


class Shorten(Protocol):
    """A context strategy: what becomes of a conversation that no longer fits."""

    async def __call__(self, messages: Sequence[Message], room: Room) -> Sequence[Message] | None:
        """A shorter conversation, or None to stop. The first messages are the task's own."""


async def stop(messages: Sequence[Message], room: Room) -> None:
    """The rollout ends with stop reason `context`."""


async def drop_outputs(messages: Sequence[Message], room: Room) -> Sequence[Message] | None:
    """Drop tool outputs, the oldest first, until the rest fits.

    What the last turn's calls gave stays.
    """
    shorter = list(messages)
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    old = [index for index, message in enumerate(messages[:last]) if message.role == "tool"]
    left = [index for index in old if messages[index].content != DROPPED]
    for index in left:
        shorter[index] = replace(messages[index], content=DROPPED)
        if room.fits(shorter):
            break
    return shorter if left else None


async def summarise(messages: Sequence[Message], room: Room) -> Sequence[Message] | None:
    """The policy sums up its work; what follows sees the task and the summary."""
    ask = Message(role="user", content=ASK)
    task = [message for message in messages if message.role in ("system", "user")]
    shown = list(messages)
    for index, message in enumerate(messages):
        if message.role == "tool" and not room.fits([*shown, ask]):
            shown[index] = replace(message, content=DROPPED)
    summary = await room.ask([*shown, ask])
    last = task[-1]
    asked = last.content.partition(f"\n\n{SUMMARY}")[0]  # an earlier summary is in the new one
    told = replace(last, content=f"{asked}\n\n{SUMMARY}{summary}")
    shorter = [*task[:-1], told]
    return shorter if room.fits(shorter) else None
