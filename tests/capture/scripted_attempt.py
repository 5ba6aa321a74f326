"""An attempt whose policy says what it is told to, for the tests of the model endpoint."""

from __future__ import annotations

from prorl.agents.context import AttemptContext
from prorl.envs import get_env
from prorl.protocols import Backend
from prorl.types import RolloutLimits
from tests.agents.test_native import context


def attempt(
    backend: Backend, *, max_tokens: int = 1 << 24, max_turns: int = 1000, **changes: object
) -> AttemptContext:
    limits = RolloutLimits(max_tokens=max_tokens, max_turns=max_turns)
    return context(backend, get_env("math"), limits, messages=(), tools=(), **changes)
