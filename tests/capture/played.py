"""An attempt whose policy says what it is told to, for the tests of the door."""

from __future__ import annotations

from prorl.agents.context import AttemptContext
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.testing import RENDERER, make_task
from prorl.types import AttemptKey, RolloutLimits


def attempt(
    backend: Backend, *, max_tokens: int = 1 << 24, max_turns: int = 1000
) -> AttemptContext:
    return AttemptContext(
        task=make_task("math", "Half of 48?", answer="24"),
        env=get_env("math"),
        messages=(),
        tools=(),
        renderer=RENDERER,
        backend=backend,
        sandbox=None,
        deadline=Deadline(60.0),
        key=AttemptKey("run", 5, 2),
        session="key",
        limits=RolloutLimits(max_tokens=max_tokens, max_turns=max_turns),
    )
