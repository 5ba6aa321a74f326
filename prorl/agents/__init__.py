"""Agents: how the policy is driven through a task.

`native` is the tool loop; a program runs in the sandbox and asks by HTTP (`programs.py` has the
table); `get_agent` finds them by name.

`context` is what an agent of ours is given for one attempt, `sampler` how it asks the policy,
`record` what it writes down. An agent of a user runs in a helper: `attempt` is what it sees,
`users` our side of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl import plugins
from prorl.agents.programs import PROGRAMS, program_of
from prorl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.agents.context import Agent

BUILT_IN: Mapping[str, str] = {
    "native": "prorl.agents.native:NativeAgent",
    "guest": "prorl.agents.guest:GuestAgent",
    **dict.fromkeys(PROGRAMS, "prorl.agents.program:ProgramAgent"),
}

ENTRY_POINTS = "prorl.agents"


def get_agent(name: str) -> Agent:
    """An agent by name; your own is an entry point of the group `prorl.agents`.

    Raises ConfigError with the nearest name.
    """
    if (program := program_of(name)) is not None:
        from prorl.agents.program import ProgramAgent

        return ProgramAgent(name, program)
    if name in BUILT_IN:
        agent: Agent = plugins.make(ENTRY_POINTS, name, ConfigError, BUILT_IN)
        return agent
    check_agent(name)
    from prorl.agents.users import UsersAgent

    return UsersAgent(name)


def is_ours(name: str) -> bool:
    """Raises ConfigError for a command that is none."""
    return name in BUILT_IN or program_of(name) is not None


def shows_turns(name: str) -> bool:
    """Returns whether an agent can show the policy the turns of an env that has its own: the native
    loop and users' agents can.
    """
    return name == "native" or not is_ours(name)


def check_agent(name: str) -> None:
    """Raise ConfigError for a name that stands for no agent. Nothing is imported for it."""
    if not (is_ours(name) or plugins.is_place(name)):
        users = plugins.registered(ENTRY_POINTS)
        if name not in users:
            raise plugins.unknown(ENTRY_POINTS, name, [*BUILT_IN, *users], ConfigError)
