"""The lint of names in `make check`: vague names by room, and class names that are bound twice.

    python -m tests.names            fails where a room has more vague names than its bound allows
    python -m tests.names --figures  prints every room, the worst first, and fails as well

A name is vague if one of its parts is a participle or a pronoun that stands where a noun should say
the role of the value: `found` for a path, `said` for a reply. Counted are the names that the code
binds: functions, classes, arguments, variables, attributes. `left` is the operand of an operator
where the same scope binds `right`. A room is a folder, down to three levels. The bounds are in
pyproject.toml, by 1,000 names: when a room has become better than its bound, lower the bound.
"""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VAGUE = frozenset(
    {"asked", "found", "given", "gone", "heard", "held", "known", "left", "one", "said", "shown"}
    | {"taken", "told", "wanted", "whose"}
)
EMPTY = frozenset({"alike", "doom", "made", "what"})
"""Whole names that say nothing, in code; as a part of a name they may (`made_at`)."""
TERMS = frozenset({"leave_one_out", "NotFoundError"})
"""Names of the field and of HTTP that hold such a part."""
CODE = ("prorl", "stages", "storage", "trainer")


@dataclass(slots=True)
class Room:
    """The names that one folder binds, and the files of its classes."""

    num_names: int = 0
    vague: list[str] = field(default_factory=list)
    """`file:line name`, in the order of the files."""

    @property
    def rate(self) -> float:
        return 1000 * len(self.vague) / max(1, self.num_names)

    def limit(self, bound: float) -> int:
        """The number of vague names that a bound by 1,000 allows; a small room may have one."""
        return math.ceil(bound * self.num_names / 1000)


def parts(name: str) -> set[str]:
    """The words of a name.

    >>> sorted(parts("numHeld_bytes"))
    ['bytes', 'held', 'num']
    """
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def bindings(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yields each name that a module binds, its line, and whether it is vague.

    >>> [name for name, _, vague in bindings(ast.parse("left, right, told = 1, 2, 3")) if vague]
    ['told']
    """
    scopes: list[ast.AST] = [tree]
    while scopes:
        scope = scopes.pop()
        names: list[tuple[str, int]] = []
        nodes = list(ast.iter_child_nodes(scope))
        while nodes:
            node = nodes.pop()
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.append((node.name, node.lineno))
                    scopes.append(node)
                    continue
                case ast.Lambda():
                    scopes.append(node)
                    continue
                case ast.arg():
                    names.append((node.arg, node.lineno))
                case ast.Name(ctx=ast.Store()):
                    names.append((node.id, node.lineno))
                case ast.Attribute(ctx=ast.Store()):
                    names.append((node.attr, node.lineno))
                case ast.ExceptHandler(name=str(name)):
                    names.append((name, node.lineno))
            nodes += ast.iter_child_nodes(node)
        bound = {name for name, _ in names}
        for name, line in names:
            words = parts(name) & VAGUE
            is_operand = words == {"left"} and name.replace("left", "right") in bound
            yield name, line, bool(words) and not is_operand and name not in TERMS


def measure(paths: Iterable[Path]) -> tuple[dict[str, Room], dict[str, list[str]]]:
    """Returns the rooms of files, and by class name where a class of this name stands in code."""
    rooms: dict[str, Room] = defaultdict(Room)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        file = path.relative_to(ROOT)
        tree = ast.parse(path.read_text())
        room = rooms["/".join(file.parent.parts[:3])]
        for name, line, is_vague in bindings(tree):
            room.num_names += 1
            is_empty = file.parts[0] in CODE and name.strip("_") in EMPTY
            if is_vague or is_empty:
                room.vague.append(f"{file}:{line} {name}")
        if file.parts[0] in CODE:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(f"{file}:{node.lineno}")
    return dict(rooms), dict(classes)


def problems(
    rooms: Mapping[str, Room], classes: Mapping[str, list[str]], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yields a line for each room above its bound, and for each class name that is bound twice."""
    for name, room in rooms.items():
        bound = settings["rooms"].get(name, settings[_kind(name)])
        if len(room.vague) > room.limit(bound):
            listed = "".join(f"\n    {place}" for place in room.vague)
            yield (
                f"{name}: {len(room.vague)} of {room.num_names} names are vague,"
                f" {room.limit(bound)} may be: name the role of the value{listed}"
            )
    for name, places in classes.items():
        if len(places) > 1 and name not in settings["repeated_classes"]:
            yield f"class {name} stands in {' and '.join(places)}: give each a name of its own"


def _kind(room: str) -> str:
    return "tests" if room.split("/")[0] == "tests" else "code"


def tracked() -> list[Path]:
    """Returns the Python files that git knows."""
    listing = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in (*CODE, "tests"))],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for line in listing.stdout.splitlines() if (path := ROOT / line).is_file()]


def main() -> int:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["prorl"]["names"]
    rooms, classes = measure(tracked())
    if "--figures" in sys.argv:
        for name, room in sorted(rooms.items(), key=lambda entry: -entry[1].rate):
            print(f"{room.rate:6.1f} {len(room.vague):4d} of {room.num_names:5d} {name}")
    lines = list(problems(rooms, classes, settings))
    print("\n".join(lines) or f"Names: {len(rooms)} rooms are within their bounds")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
