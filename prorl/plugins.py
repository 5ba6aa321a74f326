"""Parts by name: our own first, then what users' packages register.

The one place that reads installed packages' metadata.

    [project.entry-points."prorl.envs"]
    trivia = "mypkg.trivia:TriviaEnv"

| group | value | contract |
|---|---|---|
| prorl.envs | class or function without arguments that gives an env | `prorl.protocols.Env` |
| prorl.agents | the same for an agent | `prorl.protocols.Agent` |
| prorl.backends | function that opens the backends of a URL scheme | `prorl/backends/catalogue.py` |
| prorl.tools | class without arguments, called inside sandboxes | `prorl/tools/__init__.py` |

A name of ours wins over a user's; of two packages that register one name, the one that Python finds
first. A part that is not there or cannot be imported is the caller's error in one line; it is
raised where a run or task is accepted, before anything is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prorl.errors import RolloutError, UserError, boundary
from prorl.failures import FailureCode

TOOLS = "prorl.tools"
SERVED_TOOLS = frozenset({"bash", "python", "files", "ipython", "jupyter"})
"""Names of the tools that every tool server has of its own; any other is a user's."""
NO_PARTS: Mapping[str, str] = {}


def registered(group: str) -> dict[str, EntryPoint]:
    """Users' entry points of a group; imports nothing of theirs."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, point)
    return found


def load(
    group: str, name: str, error: type[UserError], built_in: Mapping[str, str] = NO_PARTS
) -> Any:
    """What a name stands for, imported:

    `built_in` has `module:attribute`. Raises `error` with the nearest name, or why it failed.
    """
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    users = registered(group)
    if name not in users:
        raise unknown(group, name, [*built_in, *users], error)
    return import_user(group, users[name], error)


def make(
    group: str, name: str, error: type[UserError], built_in: Mapping[str, str], *args: object
) -> Any:
    """What a name stands for, imported and called.

    Raises `error` as `load` does, also when the call fails.
    """
    factory = load(group, name, error, built_in)
    with _blaming(group, name, "made", error):
        return factory(*args)


def unknown(group: str, name: str, known: Iterable[str], error: type[UserError]) -> UserError:
    """The error for a name that nobody has registered."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1)
    mend = (
        f"did you mean {near[0]!r}?"
        if near
        else f"register your own as an entry point of the group {group!r}"
    )
    return error(
        f"unknown {noun(group)} {name!r}", f"one of {', '.join(names)}" if names else "", mend
    )


def import_user(group: str, point: EntryPoint, error: type[UserError]) -> Any:
    """Import a user's part. Whatever its module raises becomes `error`."""
    with _blaming(group, point.name, f"imported from {point.value}", error):
        return point.load()


@contextmanager
def _blaming(group: str, name: str, done: str, error: type[UserError]) -> Iterator[None]:
    """Whatever a part's own code raises becomes `error`, which names the part."""
    try:
        with boundary(
            RolloutError, FailureCode.BAD_TASK, f"{noun(group)} {name!r} cannot be {done}"
        ):
            yield
    except RolloutError as cause:
        raise error(
            cause.message, mend="mend the package that registers it, or uninstall it"
        ) from cause


def noun(group: str) -> str:
    """What a part of a group is called.

    >>> noun("prorl.envs")
    'env'
    """
    return group.removeprefix("prorl.").removesuffix("s")
