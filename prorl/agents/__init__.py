"""Agents: how the policy is driven through a task.

`native` is the tool loop; `get_agent` finds it by name.

`context` is what an agent is given for one attempt, `sampler` how it asks the policy, `record` what
it writes down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl import plugins
from prorl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.protocols import Agent

BUILT_IN: Mapping[str, str] = {
    "native": "prorl.agents.native:NativeAgent",
    "native-drop": "prorl.agents.native:native_drop",
    "native-summary": "prorl.agents.native:native_summary",
}

ENTRY_POINTS = "prorl.agents"


def get_agent(name: str) -> Agent:
    """An agent by name; your own is an entry point of the group `prorl.agents`.

    Raises ConfigError with the nearest name.
    """
    agent: Agent = plugins.make(ENTRY_POINTS, name, ConfigError, BUILT_IN)
    return agent


def check_agent(name: str) -> None:
    """Raise ConfigError for a name that stands for no agent; ours are not imported for it."""
    if name not in BUILT_IN:
        get_agent(name)
