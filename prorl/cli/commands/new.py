"""`prorl new env NAME`: an env that works, with test and tasks, to be changed into yours."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Literal

from prorl.cli.output import say
from prorl.errors import ConflictError, UserError

FILES = {
    "env.py.in": "{name}.py",
    "test_env.py.in": "test_{name}.py",
    "tasks.jsonl.in": "tasks.jsonl",
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def new(kind: Literal["env"], name: str, /, *, into: Path = Path()) -> int:
    """Start a part of your own: a folder with what works already, to be changed into yours.

    Parameters
    ----------
    kind
        What: `env`, with its test and two tasks.
    name
        Its name; also the folder's.
    into
        Where the folder is made.
    """
    _check(name)
    folder = into / name
    _fill(folder, name)
    say(f"{folder}: {', '.join(path.format(name=name) for path in FILES.values())}")
    say(f"  python -m pytest {folder}             its test")
    say(f"  prorl check {folder}/tasks.jsonl      oracle 1, no-op 0, twice the same")
    say(f"  prorl run --tasks {folder}/tasks.jsonl --policy oracle")
    return 0


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"name {name!r}", "lower-case letters, digits and `_`, a letter first")
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise UserError(f"name {name!r}", "a name that Python has not taken", f"my_{name}")


def _fill(folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConflictError(f"{folder} exists", "a name that is free") from None
    for template, path in FILES.items():
        text = files("prorl").joinpath("assets/new", template).read_text()
        (folder / path.format(name=name)).write_text(filled(text, name))


def filled(text: str, name: str) -> str:
    """A template for this name.

    >>> filled("class CLASS: name = 'NAME'", "my_env")
    "class MyEnv: name = 'my_env'"
    """
    title = "".join(part.title() for part in name.split("_"))
    return text.replace("NAME", name).replace("CLASS", title)
