"""`prorl new KIND NAME`: a part that works, with test and tasks, to be changed into yours."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from prorl.cli.output import say
from prorl.errors import ConflictError, UserError

NEXT = {
    "env": {
        "its test": "python -m pytest FOLDER",
        "its tasks": "prorl check FOLDER/tasks.jsonl",
        "its rollouts": "prorl run --tasks FOLDER/tasks.jsonl --policy oracle",
    },
    "agent": {
        "its test": "python -m pytest FOLDER",
        "its rollouts": "prorl run --tasks 'arith:train?n=8' --agent FOLDER/NAME.py:CLASS",
    },
    "tool": {
        "make it known": "pip install -e FOLDER",
        "its tests": "python -m pytest FOLDER",
        "its tasks": "prorl check FOLDER/tasks.jsonl",
    },
    "filter": {
        "what it keeps": (
            "prorl run --tasks 'arith:train?n=8' --policy flaky --filter FOLDER/NAME.sql"
        ),
    },
}
"""The commands that one runs next with a new part of each kind."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def new(
    kind: Literal["env", "agent", "tool", "filter"], name: str, /, *, into: Path = Path()
) -> int:
    """Start a part of your own: a folder with a small example that works, to be changed into yours.

    Example: prorl new env parcels

    Parameters
    ----------
    kind
        `env` (questions and rewards), `agent` (who drives the policy), `tool` (what a policy calls
        in its sandbox), `filter` (which groups are trained on); all but a filter with a test.
    name
        Its name; also the folder's.
    into
        Where the folder is made.
    """
    _check(name)
    folder = into / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConflictError(f"{folder} exists", "a name that is not used yet") from None
    paths = sorted(_fill(files("prorl").joinpath("assets/new", kind), folder, name))
    say(f"{folder}: {', '.join(str(path.relative_to(folder)) for path in paths)}")
    for step, command in NEXT[kind].items():
        say(f"  {step:<15} {filled(command.replace('FOLDER', str(folder)), name)}")
    return 0


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"name {name!r}", "lower-case letters, digits and `_`, a letter first")
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise UserError(f"name {name!r}", "a name that Python has not taken", f"my_{name}")


def _fill(templates: Traversable, folder: Path, name: str) -> Iterator[Path]:
    """Write each template of a tree under its own name; yields the files."""
    for template in templates.iterdir():
        target = folder / template.name.replace("NAME", name).removesuffix(".in")
        if template.is_dir():
            target.mkdir()
            yield from _fill(template, target, name)
        else:
            target.write_text(filled(template.read_text(), name))
            yield target


def filled(text: str, name: str) -> str:
    """A template for this name.

    >>> filled("class CLASS: name = 'NAME'", "my_env")
    "class MyEnv: name = 'my_env'"
    """
    title = "".join(part.title() for part in name.split("_"))
    return text.replace("NAME", name).replace("CLASS", title)
