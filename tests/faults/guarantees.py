"""`docs/guarantees.md` as a table: which lines carry each guarantee, and how to switch one off.

A cell of the page is read as it is written: words in backticks that end in `.py` are files below
`prorl/`, and what stands before them is in them. A name is its function; other words are the
statement on whose line they stand. A statement is switched off as its kind asks:

    if, while, elif   the condition is False        return      None
    for               over nothing                  def         nothing is done, None is returned
    with              without that manager          all else    pass
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
QUOTED = re.compile(r"`([^`]+)`")
MOST = 8
"""Places of one word; more are no line."""
NAME = re.compile(r"\w+(?:\.\w+)?(?:\(\.\.\.\))?")


class Row(NamedTuple):
    """One row of the page."""

    guarantee: str
    lines: str
    tests: str


class Place(NamedTuple):
    """A line that a row names."""

    file: str
    """Relative to the tree."""
    words: str
    start: int
    """Of the text that is replaced, in characters."""
    stop: int
    off: str
    """What stands there when it is switched off."""
    unbinds: bool = False
    """Whether a name would have no value then: any test would fail, whatever it looks at."""


def rows(page: str) -> list[Row]:
    """The rows of the page's first table."""
    table = page.partition("|---|---|---|\n")[2].partition("\n\n")[0]
    return [
        Row(*(cell.strip() for cell in line.strip("| ").split(" | ")))
        for line in table.splitlines()
    ]


def pytest_arguments(row: Row) -> list[list[str]]:
    """Arguments of pytest, one list for each file of the row."""
    argument_lists: list[list[str]] = []
    name = ""
    for word in QUOTED.findall(row.tests):
        if word.startswith("-k "):
            argument_lists[-1] += ["-k", word[3:]]
        elif word.startswith("tests/"):
            argument_lists.append([f"{word}::{name}" if name else word])
            name = ""
        else:
            name = word
    return argument_lists


@cache
def places(row: Row, root: Path = ROOT) -> list[tuple[str, list[Place]]]:
    """Returns each word of a row, and where it stands: nowhere, if the page is wrong."""
    words_of_row = []
    for group in _groups(row.lines):
        files = [f"prorl/{file}" for file in group.files] or modules(root)
        for words in group.words:
            matches = [
                place for file in files for place in _of_file(root, file, words, group.scope)
            ]
            words_of_row.append((words, matches if len(matches) <= MOST else []))
    return words_of_row


class _Group(NamedTuple):
    words: list[str]
    scopes: list[str]
    """The function that they stand in, if one is named."""
    files: list[str]

    @property
    def scope(self) -> str:
        return self.scopes[0] if self.scopes else ""


def _groups(cell: str) -> list[_Group]:
    groups = [_Group([], [], [])]
    end = 0
    for match in QUOTED.finditer(cell):
        before, word, group = cell[end : match.start()].strip(), match[1], groups[-1]
        end = match.end()
        if word.endswith(".py"):
            group.files.append(word)
        elif group.words and not group.files and re.search(r"(^|\s)(in|of)$", before):
            group.scopes.append(word)
        elif group.files or group.scopes:
            groups.append(_Group([word], [], []))
        else:
            group.words.append(word)
    return groups


@cache
def modules(root: Path) -> list[str]:
    folders = ("prorl", "stages", "storage", "trainer")
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [str(path.relative_to(root)) for path in paths]


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _of_file(root: Path, file: str, words: str, scope: str) -> list[Place]:
    path = root / file
    if not path.is_file():
        return []
    words, text = words.removesuffix("(...)"), _text(path)
    word = re.compile(rf"(?<!\w){re.escape(words)}")
    is_defined = f"def {words.rpartition('.')[2]}(" in text
    if not is_defined and (words not in text or not word.search(text)):
        return []  # as in most modules, which are not parsed then
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    inside = range(1, len(starts))
    if scope:
        node = _definitions(path).get(scope)
        if node is None:
            return []
        inside = range(node.lineno + 1, (node.end_lineno or 0) + 1)
    elif is_defined and NAME.fullmatch(words) and (node := _definitions(path).get(words)):
        return [_place(file, words, node, text, starts)]
    matches = []
    for number, line in enumerate(text.splitlines(), 1):
        named = number in inside and words in line and word.search(line)
        if named and not line.lstrip().startswith(("#", "import ", "from ")):
            node = _statement(_tree(path), number)
            if node is not None:
                matches.append(_place(file, words, node, text, starts))
    return matches


@cache
def _definitions(path: Path) -> dict[str, ast.stmt]:
    """The functions of a file by name, the outermost of each; methods by `Class.name`, too."""
    by_name: dict[str, ast.stmt] = {}
    for node in ast.walk(_tree(path)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                by_name.setdefault(each.name, each)
                if isinstance(node, ast.ClassDef):
                    by_name.setdefault(f"{node.name}.{each.name}", each)
    return by_name


def _statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement whose own words are on a line; None for a docstring."""
    best = None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            if not any(child.lineno <= line <= (child.end_lineno or 0) for child in inner):
                best = node
    is_text = isinstance(best, ast.Expr) and isinstance(best.value, ast.Constant)
    return None if is_text or isinstance(best, ast.ClassDef) else best


def _place(file: str, words: str, node: ast.stmt, text: str, starts: list[int]) -> Place:
    def at(line: int, column: int) -> int:
        row = text[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(row[:column].decode())

    def span(part: ast.AST) -> tuple[int, int]:
        return (
            at(part.lineno, part.col_offset),  # type: ignore[attr-defined]
            at(part.end_lineno, part.end_col_offset),  # type: ignore[attr-defined]
        )

    match node:
        case ast.If() | ast.While():
            return Place(file, words, *span(node.test), "False")
        case ast.For() | ast.AsyncFor():
            return Place(file, words, *span(node.iter), "()")
        case ast.With() | ast.AsyncWith():
            item = next((i for i in node.items if words in ast.unparse(i)), node.items[0])
            return Place(
                file, words, *span(item.context_expr), "__import__('contextlib').nullcontext()"
            )
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
            start, stop = span(node.body[0])[0], span(node.body[-1])[1]
            return Place(file, words, start, stop, "yield" if yields else "return None")
        case ast.Return():
            return Place(file, words, *span(node), "return None")
    unbinds = isinstance(node, ast.Import | ast.ImportFrom) or any(
        isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) for part in ast.walk(node)
    )
    return Place(file, words, *span(node), "pass", unbinds)
