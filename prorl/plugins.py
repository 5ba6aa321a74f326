"""Parts by name: our own first, then what users' packages register, then where their code is.

The one place that reads installed packages' metadata and imports code by a user's word.

    [project.entry-points."prorl.envs"]
    trivia = "mypkg.trivia:TriviaEnv"

A name with a colon says where the part is: `mypkg.trivia:TriviaEnv`, or `envs/trivia.py:TriviaEnv`
for a file that no package holds (what it imports from its own folder is found, too). Whoever sends
such a name has code run where it is read, so a service takes them only with `load_code`, as the
ones of `prorl run` do. Tools are registered: sandboxd packs them before a run is known.

| group | value | contract |
|---|---|---|
| prorl.envs | class or function without arguments that gives an env | `prorl.protocols.Env` |
| prorl.agents | the same for an agent | `prorl.agents.attempt.UserAgent` |
| prorl.sandbox_kinds | a `prorl.sandbox.kind.SandboxKind` | `prorl/sandbox/kinds/__init__.py` |
| prorl.renderers | makes a renderer of a `RendererSpec` | `prorl.protocols.Renderer` |
| prorl.formats | a `prorl.tasks.formats.Format` | `prorl/tasks/formats/__init__.py` |
| prorl.tools | class without arguments, called inside sandboxes | `prorl/tools/__init__.py` |

A name of ours wins over a user's; of two packages that register one name, the one that Python finds
first. A part that is not there or cannot be imported is the caller's error in one line; it is
raised where a run or task is accepted, before anything is started.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from prorl.errors import RolloutError, UserError, boundary, is_users
from prorl.states import FailureCode

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TOOLS = "prorl.tools"
NO_PARTS: Mapping[str, str] = {}
MEND_FILE = "mend it there"
MEND_PACKAGE = "mend the package that registers it, or uninstall it"
_IMPORTING = RLock()  # a file's module, from its first line to its last: siblings import it at once


def registered(group: str) -> dict[str, EntryPoint]:
    """Users' entry points of a group; imports nothing of theirs."""
    # here: the zygote imports this module, and every sandbox is a fork of all that it has imported
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, point)
    return points


def load(
    group: str, name: str, error: type[UserError], built_in: Mapping[str, str] = NO_PARTS
) -> Any:
    """Returns what a name stands for, imported: `built_in` has `module:attribute`. Raises `error`
    with the nearest name, or why it failed.
    """
    if name in built_in:
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    if is_place(name):
        return _from_place(group, name, error)
    users = registered(group)
    if name not in users:
        raise unknown(group, name, [*built_in, *users], error)
    return import_user(group, users[name], error)


def make(
    group: str, name: str, error: type[UserError], built_in: Mapping[str, str], *args: object
) -> Any:
    """Returns what a name stands for, imported and called. Raises `error` as `load` does, also when
    the call fails.
    """
    factory = load(group, name, error, built_in)
    hint = MEND_FILE if is_place(name) else MEND_PACKAGE
    with _blaming(group, name, "made", error, hint):
        return factory(*args)


def unknown(
    group: str, name: str, names_in_use: Iterable[str], error: type[UserError]
) -> UserError:
    """The error for a name that nobody has registered."""
    names = sorted(set(names_in_use))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"register your own as an entry point of the group {group!r}"
    if name.endswith(".py"):
        hint = f"name the class or function of the file: {f'{name}:NAME'!r}"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    return error(
        f"unknown {noun(group)} {name!r}", f"one of {', '.join(names)}" if names else "", hint
    )


def is_place(name: str) -> bool:
    """Returns whether a name says where the part's code is.

    >>> is_place("math"), is_place("mypkg.trivia:TriviaEnv"), is_place("trivia.py:TriviaEnv")
    (False, True, True)
    """
    return ":" in name


def absolute(name: str, folder: Path) -> str:
    """A name that means the same in every folder; only `file.py:attr` is changed.

    >>> absolute("trivia.py:TriviaEnv", Path("/home/me")), absolute("math", Path("/home/me"))
    ('/home/me/trivia.py:TriviaEnv', 'math')
    """
    file, _, attribute = name.rpartition(":")
    return f"{(folder / file).absolute()}:{attribute}" if file.endswith(".py") else name


def version_of(names: Iterable[str]) -> str:
    """SHA-256 of the files that `file.py:attr` names, so that an edit has fresh helpers; what such
    a file imports is not part of it, nor is an installed package. Empty for a file that is away,
    which its helper says.
    """
    files = [name.rpartition(":")[0] for name in names if is_place(name)]
    digests = []
    for file in files:
        if file.endswith(".py"):
            try:
                about = os.stat(file)
                digests.append(_sha256(file, about.st_mtime_ns, about.st_size, about.st_ino))
            except OSError:
                return ""
    return " ".join(digests)


@lru_cache(maxsize=256)
def _sha256(file: str, *_seen: int) -> str:
    """Returns the digest of a file as it was when it had this time, size and inode."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def refuse_places(name: str, error: type[UserError], kind: str) -> None:
    """Raise `error` for a name that says where its code is."""
    if is_place(name):
        raise error(
            f"{kind} {name!r} names code, which this service does not load",
            "a registered name",
            "start the service with load_code, or register it as an entry point",
        )


def _from_place(group: str, name: str, error: type[UserError]) -> Any:
    """Returns what `module:attribute` or `file.py:attribute` is. Raises `error`."""
    place, _, attribute = name.rpartition(":")
    with _blaming(group, name, "imported", error, MEND_FILE):
        target: Any = _import_file(Path(place)) if place.endswith(".py") else import_module(place)
        is_users(target.__name__)
        for part in attribute.split("."):
            if not hasattr(target, part):
                near = difflib.get_close_matches(part, dir(target), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise AttributeError(f"{place} has no attribute {part!r}{hint}")
            target = getattr(target, part)
        return target


def _import_file(path: Path) -> ModuleType:
    """A file as a module of its own, once a process; its folder comes last in the search path."""
    path = path.absolute()
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    module_name = f"prorl_user_{path.stem}_{digest}"
    with _IMPORTING:
        if module_name in sys.modules:
            return sys.modules[module_name]
        spec = spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module


def import_user(group: str, point: EntryPoint, error: type[UserError]) -> Any:
    """Import a user's part. Whatever its module raises becomes `error`."""
    with _blaming(group, point.name, f"imported from {point.value}", error):
        is_users(point.module)
        return point.load()


@contextmanager
def _blaming(
    group: str,
    name: str,
    done: str,
    error: type[UserError],
    hint: str = MEND_PACKAGE,
) -> Iterator[None]:
    """Anything that a part's own code raises becomes `error`, which names the part."""
    try:
        with boundary(
            RolloutError, FailureCode.BAD_TASK, f"{noun(group)} {name!r} cannot be {done}"
        ):
            yield
    except RolloutError as cause:
        raise error(cause.message, hint=hint) from cause


def noun(group: str) -> str:
    """Returns what a part of a group is called.

    >>> noun("prorl.envs"), noun("prorl.sandbox_kinds")
    ('env', 'sandbox kind')
    """
    return group.removeprefix("prorl.").removesuffix("s").replace("_", " ")
