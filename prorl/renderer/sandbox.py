"""Runs a checkpoint's chat template, which is code of strangers.

It runs in jinja2's immutable sandbox, with bounds.

Invariants: a template gets plain JSON values and changes none; nothing of Python is reachable
through attributes; there is no loader, so `include` and `import` raise; a render ends after
`MAX_STEPS` loop items or `MAX_CHARS` characters with a `TemplateFault`. Not bounded: the memory
that one filter or string method takes (`center`), and calls: the process that proves a template
(`check.py`) has a limit of processor time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sized
from datetime import date, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl.types import Json

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


def _bound(count: float, limit: int, what: str) -> None:
    if count > limit:
        raise TemplateFault(f"more than {limit:,} {what} in one render")


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
