"""An agent of one's own: it asks twice, and the second answer is the artifact.

prorl run ... --set run.agent=tests/agents/two_turn_agent.py:Plain      # with service.load_code
"""

from __future__ import annotations

from prorl.agents.attempt import Attempt
from prorl.types import Message

AGAIN = Message(role="user", content="Are you sure? Answer again.")


class Plain:
    """Implements `prorl.agents.attempt.UserAgent`."""

    async def run(self, attempt: Attempt) -> str | None:
        await attempt.sample(attempt.messages)
        return (await attempt.sample([AGAIN])).content
