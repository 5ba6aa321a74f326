"""A model's chat template as its directory holds it, and how our records look to it.

    template = ChatTemplate.load(Path("Qwen3-4B"), date(2026, 11, 22))
    template.render([{"role": "user", "content": "6*7?"}], tools=None, add_generation_prompt=True)

What a template sees is what transformers' `apply_chat_template` gives it: messages and tools in
OpenAI's form, the special tokens of tokenizer_config.json, `strftime_now` (of one day: a run over
midnight keeps its prompts), and the variables of the run. A variable that the template does not
read is refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import orjson
from jinja2 import meta, nodes

from prorl.errors import ConfigError
from prorl.renderer.sandbox import TemplateFault, TemplateSandbox
from prorl.types import Json, Message, ToolCall, ToolSpec

_OURS = ("messages", "tools", "add_generation_prompt", "documents", "builtin_tools")
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class ChatTemplate:
    """One template with its variables. Raises ConfigError for what jinja2 cannot read."""

    def __init__(
        self, source: str, today: date, variables: Mapping[str, Json], where: str = "chat template"
    ) -> None:
        self.source, self.where = source, where
        self._sandbox = TemplateSandbox(today)
        try:
            self._template = self._sandbox.from_string(source)
            # Variables that a template expects. One that it sets itself counts if it asks whether
            # it is defined.
            tree = self._sandbox.parse(source)
            own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
            asked = {
                test.node.name
                for test in tree.find_all(nodes.Test)
                if test.name == "defined" and isinstance(test.node, nodes.Name)
            }
            self.reads = frozenset(meta.find_undeclared_variables(tree)) - (own - asked)
        except jinja2.TemplateError as cause:
            raise ConfigError(
                f"{where}: {cause}", "a Jinja template", "take the file from the model's repository"
            ) from cause
        self._variables = dict(variables)

    @cached_property
    def sha256(self) -> str:
        return sha256(self.source.encode()).hexdigest()

    @property
    def switches(self) -> tuple[str, ...]:
        """Variables that a run may set."""
        return tuple(sorted(self.reads - set(_OURS) - set(_SPECIALS) - set(self._sandbox.globals)))

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a variable that the template does not read."""
        for name in names:
            if name not in self.switches:
                close = difflib.get_close_matches(name, self.switches, n=1)
                known = ", ".join(self.switches) or "none"
                raise ConfigError(
                    f"{self.where} reads no variable {name!r}",
                    f"one of its own: {known}",
                    f"did you mean {close[0]!r}?" if close else "leave it out",
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation. Raises TemplateFault."""
        return self._sandbox.run(
            self._template,
            {
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )

    def try_render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str | None:
        """The text, or None where the template refuses such a conversation."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateFault:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    directory: Path
    template: str
    """Empty when it has none."""
    tool_template: str
    """A template of its own for conversations with tools; mostly empty."""
    special_tokens: Mapping[str, str]
    stop_ids: tuple[int, ...]
    """`eos_token_id` of generation_config.json or config.json."""
    vocab_size: int
    """Rows of the embedding; 0 when not stated."""


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the small JSON files and the template; a file that is not there says nothing."""
    settings = _json(directory / "tokenizer_config.json")
    templates = _templates(directory, settings)
    config = _json(directory / "config.json")
    eos = _json(directory / "generation_config.json").get(
        "eos_token_id", config.get("eos_token_id")
    )
    size = (config.get("text_config") or config).get("vocab_size", 0)
    return Checkpoint(
        directory=directory,
        template=templates.get("default", ""),
        tool_template=templates.get("tool_use", ""),
        special_tokens={
            name: str(value.get("content", "") if isinstance(value, dict) else value)
            for name in _SPECIALS
            if (value := settings.get(name))
        },
        stop_ids=tuple(value for value in _list(eos) if isinstance(value, int)),
        vocab_size=size if isinstance(size, int) else 0,
    )


def _templates(directory: Path, settings: Mapping[str, Json]) -> dict[str, str]:
    """The checkpoint's templates, from where transformers looks for them.

    chat_template.jinja, else chat_template.json, else tokenizer_config.json.
    """
    more = {
        path.stem: path.read_text("utf-8")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    file = directory / "chat_template.jinja"
    if file.is_file():
        return {**more, "default": file.read_text("utf-8")}
    found = _json(directory / "chat_template.json").get("chat_template")
    found = found or settings.get("chat_template")
    if isinstance(found, str):
        return {**more, "default": found}
    named = {str(entry.get("name")): str(entry.get("template")) for entry in _list(found)}
    return {**more, **named}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as cause:
        raise ConfigError(
            f"cannot read {path}: {cause}", "a JSON object", "fetch the model again"
        ) from cause
    return found if isinstance(found, dict) else {}


def _list(value: Json) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateDialect:
    arguments_as_text: bool = False
    """Calls carry their arguments as JSON text (DeepSeek V3 and R1)."""
    silent_calls: bool = False
    """The content of a message with calls is null (DeepSeek V3 and R1)."""
    reasoning_key: str = "reasoning_content"

    def message(self, message: Message, first_call: int = 0) -> dict[str, Json]:
        """A message as the template reads it; `first_call` numbers calls without an id."""
        values: dict[str, Json] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            values["tool_call_id"] = message.call_id or made_up_id(first_call)
            values["name"] = message.name
        if message.tool_calls:
            values["tool_calls"] = [
                self._call(call, first_call + index)
                for index, call in enumerate(message.tool_calls)
            ]
            if self.silent_calls and not message.content:
                values["content"] = None
        if message.reasoning:
            values[self.reasoning_key] = message.reasoning
        return values

    def _call(self, call: ToolCall, index: int) -> dict[str, Json]:
        arguments: Json = dict(call.arguments)
        if self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": call.id or made_up_id(index),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Json]]:
        """A conversation; results without an id answer the calls before them in order."""
        values: list[dict[str, Json]] = []
        num_calls = answered = 0
        for message in messages:
            if message.role == "tool":
                values.append(self.message(message, answered))
                answered += 1
            else:
                values.append(self.message(message, num_calls))
                answered = num_calls
                num_calls += len(message.tool_calls)
        return values


def made_up_id(index: int) -> str:
    """An id for a call that has none: nine letters and digits, as Mistral's templates insist on.

    >>> made_up_id(7)
    'call00007'
    """
    return f"call{index:05d}"


def tool_values(tools: Sequence[ToolSpec]) -> list[dict[str, Json]]:
    """The tools in the form of OpenAI's API, which templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]
