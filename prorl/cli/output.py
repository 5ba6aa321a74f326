"""How commands speak: rich on a terminal, plain lines off it, one JSON value with `--json`.

Text that a policy, a tool or a task wrote goes through `clean` first: control characters and
direction marks are spelled out, so that a transcript can neither move the cursor nor retitle the
terminal nor hide what it says.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import orjson

from prorl import exact_json
from prorl.errors import ConfigError
from prorl.types import Json

_KEPT = frozenset("\n\t")


def clean(text: str) -> str:
    r"""Spell out everything that is not visible text.

    >>> clean("a\x1b[31mred\u202e\x00")
    'a\\x1b[31mred\\u202e\\x00'
    """
    return "".join(
        char
        if char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co")
        else _spell(char)
        for char in text
    )


def _spell(char: str) -> str:
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def is_terminal() -> bool:
    return sys.stdout.isatty()


def open_to_write(path: Path) -> TextIO:
    """A text file that a command was asked for. Raises ConfigError where it cannot be written."""
    try:
        return path.open("w")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "a file that can be written") from None


def say(line: str = "") -> None:
    print(line, flush=True)


def note(line: str) -> None:
    """One plain line to standard error: never part of the answer."""
    print(line, file=sys.stderr, flush=True)


def say_json(value: Json) -> None:
    text = exact_json.dumps(
        value,
        default=_default,
        option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )
    print(text.decode(), flush=True)


def answer(value: Json, lines: Iterable[str], *, json: bool) -> None:
    """What a command found: `value` as one JSON value, or else `lines` for people."""
    if json:
        say_json(value)
        return
    for line in lines:
        say(line)


def _default(value: Any) -> Json:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Rows for people: a box-free rich table on a terminal, tab-separated lines off it."""
    if is_terminal():
        _draw(columns, rows, title)
        return
    say("\t".join(columns))
    for row in rows:
        say("\t".join(_cell(value).replace("\t", "\\t").replace("\n", "\\n") for value in row))


def _draw(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def shown(value: object) -> Text:
        return Text(_cell(value), justify="right" if isinstance(value, int | float) else "left")

    grid = Table(
        title=title or None, title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*map(shown, row))
    Console().print(grid)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return clean(value.decode("utf-8", "backslashreplace"))
    return clean(str(value))
