"""The kinds of sandbox: one row and one module each; users may add theirs.

A kind is a file whose `KIND` (`prorl.sandbox.kind.SandboxKind`) says how it starts and what it can
do, and one row of `CATALOGUE`, which config, sandboxd, `prorl doctor`, benchmarks and docs all
read. Yours is an entry point of an installed package, never chosen by `auto`:

    [project.entry-points."prorl.sandbox_kinds"]
    microvm = "mypkg.microvm:KIND"

A module is imported only where its kind is used or probed, and `prorl.plugins` and `prorl.errors`
where they are needed: every sandbox is a fork of what the zygote has imported, which imports this
package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prorl.sandbox.kind import SandboxKind

ENTRY_POINTS = "prorl.sandbox_kinds"
AUTO = "auto"
"""Instead of a kind: the lightest that isolates and works here."""


class Entry(NamedTuple):
    """One row: what is known of a kind without importing its module."""

    place: str
    """`module:attribute` of its `SandboxKind`."""
    summary: str
    """One line for `prorl doctor`."""
    automatic: bool = True
    """True if `auto` may choose it."""


CATALOGUE: Mapping[str, Entry] = {
    "pyns": Entry(
        "prorl.sandbox.kinds.pyns:KIND",
        "Linux namespaces by Python alone: needs no package, least overhead; runs images",
    ),
    "apptainer": Entry(
        "prorl.sandbox.kinds.apptainer:KIND", "Apptainer or Singularity, rootless; runs images"
    ),
    "local": Entry(
        "prorl.sandbox.kinds.local:KIND", "a plain process: isolates little", automatic=False
    ),
}
"""In the order in which `auto` tries them: of kinds with equal walls the lightest comes first."""

_PLACES = {name: row.place for name, row in CATALOGUE.items()}


def names() -> tuple[str, ...]:
    """Names of all kinds in the order of the table, then users' own. Imports none."""
    from prorl import plugins

    return tuple(dict.fromkeys((*CATALOGUE, *plugins.registered(ENTRY_POINTS))))


def automatic() -> tuple[str, ...]:
    """The kinds that `auto` tries, in this order."""
    return tuple(name for name, row in CATALOGUE.items() if row.automatic)


def lightest() -> str:
    """The isolating kind that starts with the least work."""
    return automatic()[0]


def check(name: str) -> str:
    """The name, if it is that of a kind or `auto`; imports none. Raises ConfigError."""
    if name not in (AUTO, *names()):
        from prorl import plugins
        from prorl.errors import ConfigError

        raise plugins.unknown(ENTRY_POINTS, name, (AUTO, *names()), ConfigError)
    return name


def load(name: str) -> SandboxKind:
    """A kind by name. Raises ConfigError, also when a user's module cannot be imported."""
    from prorl import plugins
    from prorl.errors import ConfigError

    kind: SandboxKind = plugins.load(ENTRY_POINTS, name, ConfigError, _PLACES)
    return kind


def place(name: str) -> str:
    """Returns where the record of a kind of ours is, as `module:attribute`."""
    from prorl import plugins

    return _PLACES.get(name) or plugins.registered(ENTRY_POINTS)[name].value


def capable(can: Callable[[SandboxKind], bool]) -> str:
    """Names of our kinds of which `can` is true, joined by `or`, for errors."""
    return " or ".join(sorted(name for name in CATALOGUE if can(load(name))))
