"""Whether and when a dead child is started again: a pure decision, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_RESTARTS = 5
"""Of one child with no commit in between and no life that lasted."""

STEADY_S = 60.0
"""A life that lasted this long was no crash loop, whether the service had work or not."""

BACKOFF_S = (0.0, 0.1, 0.2, 0.5, 1.0)
"""Wait before each restart; a first death costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """What the decision needs to know of one child."""

    count: int = 0
    """Restarts since the last commit."""
    commits: int = 0
    """Commits of the service when the child last died."""


def on_death(before: Restarts, commits: int, lived_s: float = 0.0) -> tuple[Restarts, float | None]:
    """Next state and the seconds to wait before a restart; None = give up.

    >>> state, wait_s = on_death(Restarts(), 0)
    >>> state.count, wait_s
    (1, 0.0)
    >>> tired = Restarts(count=5, commits=3)
    >>> on_death(tired, 3)[1] is None, on_death(tired, 4)[1], on_death(tired, 3, lived_s=90)[1]
    (True, 0.0, 0.0)
    """
    moved = commits > before.commits or lived_s >= STEADY_S
    count = 0 if moved else before.count
    if count >= MAX_RESTARTS:
        return before, None
    return replace(before, count=count + 1, commits=commits), BACKOFF_S[count]
