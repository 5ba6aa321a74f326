"""Agents: how the policy is driven through a task. `native` is the tool loop; `get_agent` finds it by name.

`context` is what an agent is given for one attempt, `record` what it writes down, `seeds` where its sampling seeds come from.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from prorl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.protocols import Agent

BUILT_IN: Mapping[str, str] = {"native": "prorl.agents.native:NativeAgent"}

ENTRY_POINTS = "prorl.agents"


def get_agent(name: str) -> Agent:
    """An agent by name; your own is an entry point of the group `prorl.agents`. Raises ConfigError with the nearest name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: Agent = getattr(import_module(module), attribute)()
        return built_in
    users = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in users:
        user: Agent = users[name].load()()
        return user
    known = sorted({*BUILT_IN, *users})
    near = difflib.get_close_matches(name, known, n=1)
    mend = f"did you mean {near[0]!r}?" if near else f"register your own as an entry point of the group {ENTRY_POINTS!r}"
    raise ConfigError(f"unknown agent {name!r}", f"one of {', '.join(known)}", mend)
