"""Rendering that may not run on a loop: it is done in a helper.

    rendering = Rendering(renderer, spec, deadline)       # one an attempt
    ids = await rendering.prompt(messages, tools)

A template is Python and holds the interpreter's lock, so a thread would not do. What weighs little
is rendered at once: that takes less than the way to a helper and back. The rest waits for one of
two processes of low priority, which hold the renderer of the run. Of attempts that wait the one
that has used least comes first, so that nobody waits for the tenth prompt of somebody else. An
attempt's time goes on meanwhile.

A user's renderer is code of a stranger: RUN has a `UsersRenderer` of it, which knows its vocabulary
and its stop tokens, and all else is asked of the helpers that hold it.

A text of more bytes than `max_tokens` tokens can hold is refused before it is rendered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from prorl import exact_json, plugins
from prorl.config.renderer import RendererSpec
from prorl.errors import BudgetError, PromptTooLongError, RolloutError, TaskError
from prorl.helper.child import Answer, serve
from prorl.helper.pool import Helpers, pool
from prorl.helper.process import Died, HelperError, HelperProgram, Late
from prorl.protocols import Renderer
from prorl.renderer.load import is_ours, make_renderer
from prorl.tokenizer import max_token_bytes
from prorl.types import FailureCode, Json, Message, ToolSpec
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.limits import Deadline
    from prorl.types import Int32

ReplyT = TypeVar("ReplyT")

LIGHT_BYTES = 16 << 10
"""Rendered on the loop, about 5 ms of it. A message counts for MESSAGE_BYTES and its text."""
MESSAGE_BYTES = 256
"""A message without text takes a template as long as this many bytes."""
CPU_S = 30.0
"""For one rendering: a million tokens take ten seconds."""
MOST = 2
"""Helpers of one run's renderer: each holds its vocabulary, 100 MB and more."""
USERS_S = wait_limit_s("renderer.users")


class UsersRenderer:
    """The part of a user's renderer that lives in RUN. Its code runs in helpers."""

    def __init__(self, spec: str, facts: tuple[int, tuple[int, ...], int]) -> None:
        self.vocab_size, self.stop_token_ids, self.max_token_bytes = facts
        self._spec = spec

    @classmethod
    async def open(cls, spec: str) -> UsersRenderer:
        """Raises TaskError with what its code did wrong, and RolloutError."""
        facts = await _ask_users(spec, "facts", ())
        return cls(spec, _checked(facts, tuple[int, tuple[int, ...], int], "facts"))

    async def ids(self, method: str, *arguments: Any) -> Int32:
        """Returns the ids that `prompt`, `bridge` or `completion` gives. Raises TaskError, and
        RolloutError.
        """
        data = _checked(await _ask_users(self._spec, method, arguments), bytes, method)
        ids = np.frombuffer(data, dtype=np.int32) if len(data) % 4 == 0 else np.array([-1])
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise TaskError(
                f"the renderer's {method} gave an id that is not in its vocabulary",
                f"ids from 0 to {self.vocab_size - 1}",
            )
        return ids

    async def completion(self, message: Message) -> Int32:
        """See `Renderer.completion`."""
        return await self.ids("completion", message)

    async def parse(
        self, completion_ids: Int32, prompt_ids: Int32, tools: Sequence[ToolSpec]
    ) -> Message:
        arguments = completion_ids, prompt_ids, tools
        return _checked(await _ask_users(self._spec, "parse", arguments), Message, "parse")

    async def starts_segment(self, messages: Sequence[Message]) -> bool:
        reply = await _ask_users(self._spec, "starts_segment", (messages,))
        return _checked(reply, bool, "starts_segment")


AnyRenderer = Renderer | UsersRenderer


async def open_renderer(spec: str) -> AnyRenderer:
    """The renderer of a run, made of its spec: a vocabulary takes a second. Raises UserError, and
    RolloutError.
    """
    read = RendererSpec.from_json(spec)
    if is_ours(read):
        return await asyncio.to_thread(make_renderer, read)
    return await UsersRenderer.open(spec)


async def _ask_users(spec: str, method: str, arguments: tuple[Any, ...]) -> Any:
    label = f"the renderer's {method}"
    try:
        _, reply = await (await _helpers(spec)).ask(
            (method, arguments), label=label, wall_s=USERS_S
        )
    except HelperError as error:
        if isinstance(error, Died) and error.was_killed:
            raise RolloutError(FailureCode.STAGE_ERROR, str(error)) from None
        raise TaskError(str(error) if label in error.words else f"{label}: {error}") from None
    return reply


def _checked(reply: Any, kind: type[ReplyT], method: str) -> ReplyT:
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError as error:
        raise TaskError(f"the renderer's {method} gave what it should not: {error}") from None


async def _helpers(spec: str) -> Helpers:
    name = RendererSpec.from_json(spec).name
    version = plugins.version_of((name,))
    arguments = (spec,)
    return await pool(
        HelperProgram(
            "prorl.renderer.apart",
            arguments,
            wall_s=300.0,
            cpu_s=CPU_S,
            most=MOST,
            nice=10,
            version=version,
        )
    )


class Rendering:
    """Renders for one attempt, wherever that is done. `renderer` may be None where all of it is
    done in a helper; without a `spec` a thread stands in for the helper.
    """

    def __init__(self, renderer: AnyRenderer | None, spec: str, deadline: Deadline) -> None:
        self._renderer, self._spec, self._deadline = renderer, spec, deadline
        self._spent_s = 0.0
        """The seconds of helpers' processors."""

    async def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        """See `Renderer.prompt`. Raises TaskError, and RolloutError."""
        return await self._ids("prompt", messages, tools)

    async def bridge(self, completion_ids: Int32, messages: Sequence[Message]) -> Int32:
        """See `Renderer.bridge`. Raises TaskError, and RolloutError."""
        return await self._ids("bridge", completion_ids, messages)

    async def parse(
        self, completion_ids: Int32, prompt_ids: Int32, tools: Sequence[ToolSpec]
    ) -> Message:
        """See `Renderer.parse`."""
        assert self._renderer is not None
        if isinstance(self._renderer, UsersRenderer):
            return await self._renderer.parse(completion_ids, prompt_ids, tools)
        return self._renderer.parse(completion_ids, prompt_ids, tools)

    async def starts_segment(self, messages: Sequence[Message]) -> bool:
        """See `Renderer.starts_segment`."""
        assert self._renderer is not None
        if isinstance(self._renderer, UsersRenderer):
            return await self._renderer.starts_segment(messages)
        return self._renderer.starts_segment(messages)

    async def _ids(self, method: str, *arguments: Any) -> Int32:
        if isinstance(self._renderer, UsersRenderer):
            return await self._renderer.ids(method, *arguments)
        if self._renderer is not None and _weight(arguments) <= LIGHT_BYTES:
            ids: Int32 = getattr(self._renderer, method)(*arguments)
            return ids
        if not self._spec:
            return await asyncio.to_thread(getattr(self._renderer, method), *arguments)
        label = f"the rendering of {_size(arguments):,} bytes"
        helpers = await _helpers(self._spec)
        wall_s = max(self._deadline.remaining_s, 0.1)
        try:
            async with asyncio.timeout(wall_s):
                spent_s, data = await helpers.ask(
                    (method, arguments), label=label, rank=self._spent_s
                )
        except TimeoutError:
            text = f"{label} was not done when the attempt's time was over"
            raise BudgetError(FailureCode.DEADLINE, text) from None
        except Late as error:
            self._spent_s += CPU_S
            raise TaskError(str(error)) from None
        except HelperError as error:
            if isinstance(error, Died) and error.was_killed:
                raise RolloutError(FailureCode.STAGE_ERROR, str(error)) from None
            raise TaskError(f"{label}: {error}") from None
        self._spent_s += spent_s
        return np.frombuffer(data, dtype=np.int32)


def text_bytes(messages: Sequence[Message]) -> int:
    """Bytes of UTF-8 that a prompt shows for certain; templates leave thoughts out, and blanks."""
    return sum(len(message.content.strip().encode("utf-8", "replace")) for message in messages)


def check_fits(num_bytes: int, max_token_bytes: int, max_tokens: int) -> None:
    """Raise PromptTooLongError for a text that so many tokens cannot hold, however chosen."""
    if num_bytes > (room := max_token_bytes * max_tokens):
        raise PromptTooLongError(
            f"a prompt of {num_bytes:,} bytes",
            f"at most {room:,}: limits.max_tokens = {max_tokens:,}, of {max_token_bytes} bytes at"
            " most each",
            "shorten the task, or raise limits.max_tokens",
        )


def check_offer(
    where: str, facts: Mapping[str, Json], tools: Sequence[str], *, has_system: bool
) -> None:
    """Raise TaskError for what a model cannot be shown: tools, a system message. `facts` are those
    of `TemplateRenderer.facts`; a renderer of others says none.
    """
    if tools and (why := facts.get("no_tools")):
        raise TaskError(
            f"{where} offers the policy {', '.join(tools)}, and {why}",
            "tasks without tools for this model, or a model whose template shows calls and results",
            "use another model, or an env that offers none; where the env's own messages describe"
            " them, set renderer.allow_unrendered_tools",
        )
    if has_system and (why := facts.get("no_system")):
        raise TaskError(
            f"{where} begins with a system message, and {why}",
            "tasks without a system message for this model",
            "use another model, or an env whose `system` is empty",
        )


async def check_length(
    spec: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    max_tokens: int,
    deadline: Deadline,
) -> None:
    """Raise PromptTooLongError for one that does not fit; it is rendered only where it may not.

    An id stands for a byte at least, so a prompt of fewer bytes fits, but for what a template adds.
    """
    if _size((messages, tools)) < max_tokens:
        return
    size = len(await Rendering(None, spec, deadline).prompt(messages, tools))
    check_room(size, max_tokens)


def check_room(num_tokens: int, max_tokens: int) -> None:
    """Raise PromptTooLongError for a prompt that leaves no token to be sampled."""
    if num_tokens >= max_tokens:
        raise PromptTooLongError(
            f"a prompt of {num_tokens:,} tokens",
            f"fewer than limits.max_tokens = {max_tokens:,}",
            "shorten the task, or raise limits.max_tokens",
        )


def _weight(arguments: tuple[Any, ...]) -> int:
    """Returns the cost of a rendering, in bytes of text."""
    lists = [argument for argument in arguments if not isinstance(argument, np.ndarray)]
    return _size(arguments) + MESSAGE_BYTES * sum(map(len, lists))


def _size(arguments: tuple[Any, ...]) -> int:
    size = 0
    for item in (
        item for argument in arguments if not isinstance(argument, np.ndarray) for item in argument
    ):
        if isinstance(item, Message):
            size += len(item.content) + len(item.reasoning)
            size += sum(len(call.text) + MESSAGE_BYTES for call in item.tool_calls)
        else:
            size += len(item.description) + len(exact_json.dumps(dict(item.parameters)))
    return size


def prepare(spec: str) -> Answer:
    renderer = make_renderer(RendererSpec.from_json(spec))

    def answer(question: tuple[str, tuple[Any, ...]]) -> tuple[float, Any]:
        method, arguments = question
        began = time.process_time()
        reply = facts() if method == "facts" else getattr(renderer, method)(*arguments)
        if method in ("prompt", "bridge", "completion"):
            reply = _bytes(reply, method)
        return time.process_time() - began, reply

    def facts() -> tuple[int, tuple[int, ...], int]:
        stops = tuple(int(stop) for stop in renderer.stop_token_ids)
        return int(renderer.vocab_size), stops, max_token_bytes(renderer)

    return answer


def _bytes(ids: Any, method: str) -> bytes:
    """Raises TaskError for what are no ids."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TaskError(f"the renderer's {method} gave {ids!r:.80}", "an array of int32")
    return np.ascontiguousarray(array, dtype=np.int32).tobytes()


if __name__ == "__main__":
    serve(prepare)
