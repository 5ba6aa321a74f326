"""Prints the output of commands: rich on a terminal, plain lines off it, one JSON value with
`--json`.

Text that a policy, a tool or a task wrote goes through `clean` first: control characters and
direction marks are spelled out, so that a transcript can neither move the cursor nor retitle the
terminal nor hide what it says.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from io import StringIO
from operator import add, sub
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Literal, TextIO

import orjson

from prorl import exact_json
from prorl.errors import ConfigError
from prorl.pluralize import pluralize
from prorl.types import Json

_KEPT = frozenset("\n\t")
_START = re.compile(r"(?: *\S.{0,28}? {2,}| +)(?=\S)")
"""The part before the text of a line: its indent, or its names in columns."""
_WHOLE = re.compile(r"`[^`]{1,50}`|(?<=· )[^·`]{1,24}(?= ·|$)")
"""A command, or one of several short figures: no line ends in it if it fits on the next."""
_KEPT_SPACE = "\x1f"
_MARKS = re.compile(
    r"^(?:  )?(?:(?P<bad>fail(?:ure)?(?=  )|error(?=: ))"
    r"|(?P<doubt>warn(?:ing)?(?= )|waiting(?=  )|CUT OFF)"
    r"|(?P<good>ok(?=  )))"
)
"""The first word of a line that says how good or bad its news is."""
_COLOURS = {"bad": "31", "doubt": "33", "good": "32"}
"""ANSI's red, yellow and green."""


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


def shortened(text: str, num_chars: int) -> str:
    """Cut out the middle of a long text: its end often has the line of the code.

    >>> shortened("a message (env.py:7)", 15), shortened("short", 15)
    ('a messa…nv.py:7)', 'short')
    """
    half = num_chars // 2
    return text if len(text) <= num_chars else f"{text[:half]}…{text[len(text) - half - 1 :]}"


def is_terminal() -> bool:
    return sys.stdout.isatty()


def open_to_write(path: Path) -> TextIO:
    """A text file that a command was asked for. Raises ConfigError where it cannot be written."""
    try:
        return path.open("w")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "a file that can be written") from None


def say(line: str = "", *, indent: int | None = None) -> None:
    """One line of the answer; what follows its first line is indented by so many characters."""
    print(_fitted(line, sys.stdout, indent), flush=True)


def note(line: str) -> None:
    """One plain line to standard error: never part of the answer."""
    print(_fitted(line, sys.stderr), file=sys.stderr, flush=True)


def _fitted(line: str, stream: TextIO, indent: int | None = None) -> str:
    if not stream.isatty():
        return line
    text = broken(line, get_terminal_size().columns, indent)
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return _MARKS.sub(lambda mark: f"\x1b[{_COLOURS[mark.lastgroup or '']}m{mark[0]}\x1b[0m", text)


def broken(line: str, width: int, indent: int | None = None) -> str:
    """A line that a terminal would break in mid-word, broken between words. What follows stands
    below where the text begins, or at `indent`; a command goes on behind a backslash, so that it
    can be copied.

    >>> print(broken("  reward    mean 0.500, of 14 of 18 rollouts", 30))
      reward    mean 0.500, of 14
                of 18 rollouts
    >>> print(broken("  next      prorl sql r 'select count(*) from rollouts'", 40))
      next      prorl sql r 'select \\
                count(*) from rollouts'
    >>> print(broken("  seconds   queue 1.2/3.4 · init 0.1/0.2 · run 0.3/0.4", 50))
      seconds   queue 1.2/3.4 · init 0.1/0.2 ·
                run 0.3/0.4
    >>> print(broken("ok    disk      52 GiB free at /data", 30, 16))
    ok    disk      52 GiB free at
                    /data
    """
    if len(line) <= width:
        return line
    if indent is None:
        start = _START.match(line)
        indent = len(start[0]) if start and len(start[0]) <= width // 2 else 0
    head, text = line[:indent], line[indent:]
    command = text.startswith("prorl ")
    if not command:
        text = _WHOLE.sub(lambda part: part[0].replace(" ", _KEPT_SPACE), text)
    parts = textwrap.wrap(
        text,
        max(8, width - indent - 2 * command),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return head + (" \\\n" if command else "\n").join(
        (" " * indent if place else "") + part for place, part in enumerate(parts)
    ).replace(_KEPT_SPACE, " ")


@contextmanager
def redrawn() -> Iterator[None]:
    """Prints the block's output where the last such block stood: the terminal is neither cleared in
    between nor scrolled. What does not fit below is left out.
    """
    size, page, terminal = get_terminal_size(), _Page(), sys.stdout
    with redirect_stdout(page):
        yield
    lines = page.getvalue().splitlines()
    if len(lines) >= size.lines:
        lines[size.lines - 2 :] = [f"… and {pluralize(len(lines) - size.lines + 2, 'line')} more"]
    terminal.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    terminal.flush()


class _Page(StringIO):
    """A page of the terminal that is still to be shown."""

    def isatty(self) -> bool:
        return True


def say_json(value: Json) -> None:
    text = exact_json.dumps(
        value,
        default=_default,
        option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )
    print(text.decode(), flush=True)


def answer(value: Json, lines: Iterable[str], *, json: bool) -> None:
    """Prints a command's result: `value` as one JSON value, or else `lines` for people."""
    if json:
        say_json(value)
        return
    for line in lines:
        say(line)


def _default(value: Any) -> Json:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


VALUE_CHARS = 300
"""The limit of a value in a list of names and values."""
GAP = 2
"""Characters between two columns."""
NARROWEST = 8
"""Characters of a column that say something: where there is no room for them each row is a list."""


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", cut: bool = False
) -> None:
    """Rows for people: a box-free rich table on a terminal, tab-separated lines off it. `cut`: a
    value that does not fit ends in an ellipsis, else it goes on below.
    """
    if is_terminal():
        if cut and len(columns) * (NARROWEST + 1) > get_terminal_size().columns:
            _list(columns, rows)
        else:
            _draw(columns, rows, title, cut)
        return
    say("\t".join(columns))
    for row in rows:
        say("\t".join(_cell(value).replace("\t", "\\t").replace("\n", "\\n") for value in row))


def _list(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Each row as lines of a name and a value."""
    name_width = max(map(len, columns), default=0)
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            text = " ".join(_cell(value).split())
            say(f"{name:<{name_width}}  {text[:VALUE_CHARS]}{'…' * (len(text) > VALUE_CHARS)}")
        say()


def _draw(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str, cut: bool) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell_text(value: object, numeric: bool) -> Text:
        text = _cell(value).replace("\n", " ") if cut else _cell(value)
        right = numeric and (isinstance(value, int | float) or text == "-")
        return Text(text, justify="right" if right else "left")

    whole = list(rows)
    columns_of = zip(*whole, strict=True)
    numeric = [any(isinstance(value, int | float) for value in column) for column in columns_of]
    lines = [list(map(cell_text, row, numeric)) for row in whole]
    natural = [
        max(map(cell_len, [name, *(part for row in lines for part in row[at].plain.split("\n"))]))
        for at, name in enumerate(columns)
    ]
    console = Console()
    room = console.width - GAP * (len(columns) - 1)
    words = [
        max(map(cell_len, " ".join([name, *(row[at].plain for row in lines)]).split()), default=1)
        for at, name in enumerate(columns)
    ]
    if cut or sum(words) > room:
        widths = fitted_widths(natural, room)
    else:  # no word is broken
        more = fitted_widths(list(map(sub, natural, words)), room - sum(words))
        widths = list(map(add, words, more))
    grid = Table(
        title=title or None, title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    for column, width in zip(columns, widths, strict=True):
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if cut else "fold"
        grid.add_column(column, overflow=overflow, no_wrap=cut, width=max(1, width))
    for row in lines:
        grid.add_row(*row)
    console.print(grid)


def fitted_widths(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit into the room: the widest give way, to one level; the narrow ones,
    which a cut would make unreadable, stay as they are.

    >>> fitted_widths([4, 30, 20, 6], 40), fitted_widths([4, 6], 40)
    ([4, 15, 15, 6], [4, 6])
    """
    widths, places = list(natural), sorted(range(len(natural)), key=natural.__getitem__)
    for number, place in enumerate(places):
        widths[place] = max(0, min(natural[place], room // (len(places) - number)))
        room -= widths[place]
    return widths


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime) and is_terminal():
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, bytes):
        return clean(value.decode("utf-8", "backslashreplace"))
    return clean(str(value))
