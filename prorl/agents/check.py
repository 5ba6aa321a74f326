"""Whether a user's agent can be made, found out in a process of its own before a run is accepted.

Importing it may block, end its process or take all memory, and the gateway serves everybody.

    python -m prorl.agents.check NAME     a helper (`prorl/helper`) that is asked nothing
"""

from __future__ import annotations

from prorl.agents import get_agent, is_ours
from prorl.errors import ConfigError
from prorl.helper import HelperError, Program, Raised
from prorl.helper.child import Answer, serve
from prorl.helper.process import Helper


async def check(name: str) -> None:
    """Raises ConfigError with what its code says or did."""
    if is_ours(name):
        return
    try:
        helper = await Helper.start(Program("prorl.agents.check", (name,)))
    except HelperError as error:
        said = error.words if isinstance(error, Raised) else f"agent {name!r}: {error}"
        raise ConfigError(said) from None
    helper.end()


def prepare(name: str) -> Answer:
    get_agent(name)
    return lambda question: None


if __name__ == "__main__":
    serve(prepare)
