"""A model's chat template as its directory holds it, and how our records look to it.

What a template sees is what transformers' `apply_chat_template` gives it: messages and tools in
OpenAI's form, the special tokens of tokenizer_config.json, `strftime_now` (of one day: a run over
midnight keeps its prompts), and the variables of the run. A variable that the template does not
read is refused.

A template is code of strangers: it runs in jinja2's immutable sandbox, gets plain JSON values and
changes none; nothing of Python is reachable through attributes; there is no loader, so `include`
and `import` raise; a render ends after `MAX_STEPS` loop items or `MAX_CHARS` characters with a
`TemplateFault`. Not bounded: the memory that one filter or string method takes (`center`), and
calls: the process that proves a template (`check.py`) has a limit of processor time.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import orjson
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl.errors import ConfigError
from prorl.types import Json, Message, ToolCall, ToolSpec

MAX_STEPS = 2_000_000
MAX_CHARS = 32 << 20
_WIDE = re.compile(r"\d{5}|\*")
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")


class TemplateFault(Exception):
    """A template raised, on purpose (`raise_exception`) or not, or went beyond its bounds."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for trainers; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose loops and text are counted; one render at a time."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, today: date) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = datetime(today.year, today.month, today.day).strftime
        self.globals["range"] = self._range
        self.filters["tojson"] = _tojson
        self.filters["__counted"] = self._counted
        self._steps = 0

    def run(self, template: jinja2.Template, variables: Mapping[str, Json]) -> str:
        """The template's text. Raises TemplateFault."""
        self._steps = 0
        chunks, chars = list[str](), 0
        try:
            for chunk in template.generate(variables):
                chunks.append(chunk)
                chars += len(chunk)
                _bound(chars, MAX_CHARS, "characters")
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as cause:
            raise TemplateFault(f"{type(cause).__name__}: {cause}") from cause
        except (ArithmeticError, RecursionError, MemoryError) as cause:
            raise TemplateFault(type(cause).__name__) from cause
        return "".join(chunks)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Every loop goes over `__counted` of what it names."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "__counted", [], [], None, None)
        tree.set_environment(self)
        return tree

    def _counted(self, values: Iterable[Any]) -> Iterable[Any]:
        items = list(values) if isinstance(values, jinja2.Undefined) else values
        items = items if isinstance(items, Sized) else list(items)
        self._steps += len(items) + 1
        _bound(self._steps, MAX_STEPS, "loop items")
        return items

    def _range(self, *bounds: int) -> range:
        values = range(*bounds)
        self._steps += len(values)
        _bound(self._steps, MAX_STEPS, "loop items")
        return values

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what multiplies texts and lists into millions."""
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateFault(f"a format as wide as {left[:40]!r}")
        if operator == "**" or not all(isinstance(value, int | float) for value in (left, right)):
            size = max((len(v) for v in (left, right) if hasattr(v, "__len__")), default=1)
            times = max((v for v in (left, right) if isinstance(v, int)), default=1)
            _bound(size * times, MAX_CHARS, "characters")
        return super().call_binop(context, operator, left, right)


def _bound(count: float, limit: int, unit: str) -> None:
    if count > limit:
        raise TemplateFault(f"more than {limit:,} {unit} in one render")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: not escaped for HTML, Unicode as it is."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _ascii(text) if ensure_ascii else text


def _ascii(text: str) -> str:
    """Escaped as `json.dumps` does, but for the noncharacters that fence markers in content."""
    return "".join(
        char if ord(char) < 128 or "\ufdd0" <= char <= "\ufdef" else json.dumps(char)[1:-1]
        for char in text
    )


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
            tested = {
                test.node.name
                for test in tree.find_all(nodes.Test)
                if test.name == "defined" and isinstance(test.node, nodes.Name)
            }
            self.reads = frozenset(meta.find_undeclared_variables(tree)) - (own - tested)
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
                switches = ", ".join(self.switches) or "none"
                raise ConfigError(
                    f"{self.where} reads no variable {name!r}",
                    f"one of its own: {switches}",
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
    template = _json(directory / "chat_template.json").get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, str):
        return {**more, "default": template}
    named = {str(entry.get("name")): str(entry.get("template")) for entry in _list(template)}
    return {**more, **named}


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as cause:
        raise ConfigError(
            f"cannot read {path}: {cause}", "a JSON object", "fetch the model again"
        ) from cause
    return parsed if isinstance(parsed, dict) else {}


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
