"""The state that an env keeps of one rollout, and the bounds of its turns.

    def respond(self, task, messages, state, sandbox):
        state["tries"] = state.get("tries", 0) + 1

The state is a dict of JSON values that begins empty. `respond` and the env's tools change it in
place, reward functions read it; a tool or a reward function takes it as an argument named `state`,
any other hook by `current_state()`. Between hooks it is a text that RUN keeps and writes into the
journal beside what the hook said, so it survives the helper and the worker.
Recording it, and not calling the hooks again after a death, lets a hook draw at random or ask a
model for its turn: neither would say the same twice, and what it did to a sandbox would be done
twice.

>>> state = EnvState(seed=7)
>>> state["tries"] = 1
>>> EnvState(seed=7, text=state.text)["tries"]
1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from prorl import exact_json
from prorl.errors import TaskError
from prorl.types import Json

MAX_STATE_BYTES = 64 << 10
"""The limit of a state as JSON: each hook's state is a record of the journal, the last one a
column.
"""
MAX_RESPONSE_BYTES = 256 << 10
"""The limit of what an env says in one of its turns."""


class EnvState(dict[str, Json]):
    """The state of one rollout. What a hook leaves is read as JSON: a tuple comes back as a list.

    `seed` is the same in each hook of an attempt and differs between siblings.
    """

    def __init__(self, *, seed: int = 0, text: str = "") -> None:
        super().__init__()
        self.seed = seed
        self.committed = ""
        """The state as JSON after the last hook that ended well: what is journalled and stored."""
        if text:
            self.load(text)

    @property
    def text(self) -> str:
        """The state as JSON; empty where nothing is in it. Raises TaskError."""
        try:
            text = exact_json.dumps(dict(self)).decode() if self else ""
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"the env's state is no JSON: {error}", "JSON values by names"
            ) from None
        _check_size(text)
        return text

    def load(self, text: str) -> None:
        """Become the state that a text holds. Raises TaskError."""
        _check_size(text)
        values = exact_json.loads(text) if text else {}
        if not isinstance(values, dict):
            raise TaskError(f"the env's state is a {type(values).__name__}", "JSON values by names")
        self.clear()
        self.update(values)


def _check_size(text: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_STATE_BYTES:
        raise TaskError(
            f"the env's state has {len(text):,} bytes as JSON",
            f"at most {MAX_STATE_BYTES:,}",
            "keep what is large in the sandbox",
        )


_CURRENT: ContextVar[EnvState | None] = ContextVar("env_state", default=None)


@contextmanager
def bound(state: EnvState) -> Iterator[None]:
    """Binds a rollout's state to the code that runs in this task meanwhile."""
    token = _CURRENT.set(state)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_state() -> EnvState:
    """The state of the rollout whose hook is running; an empty one elsewhere."""
    state = _CURRENT.get()
    return EnvState() if state is None else state


def state_argument(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the current state as an argument of a function that takes `state`, else nothing."""
    takes_state = "state" in inspect.signature(function).parameters
    return {"state": current_state()} if takes_state else {}


def checked_response(response: Json, env: str) -> str | None:
    """Returns what an env's `respond` gave. Raises TaskError."""
    expected = "a text for the policy, or None for the end of the rollout"
    if response is None:
        return None
    if not isinstance(response, str) or not response.strip():
        raise TaskError(f"{env}.respond gave {response!r:.80}", expected)
    if (size := len(response.encode("utf-8", "replace"))) > MAX_RESPONSE_BYTES:
        raise TaskError(f"{env}.respond gave {size:,} bytes", f"at most {MAX_RESPONSE_BYTES:,}")
    return response
