"""The native agent with each of its context strategies, as the table of agents names them."""

from prorl.agents.native import NativeAgent
from prorl.agents.shorten import drop_outputs, summarise


def native_drop() -> NativeAgent:
    """Make the agent `native-drop`, which leaves out the oldest tool outputs."""
    return NativeAgent(drop_outputs)


def native_summary() -> NativeAgent:
    """Make the agent `native-summary`, whose policy sums up what went before."""
    return NativeAgent(summarise)
