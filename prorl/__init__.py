"""Rollout-as-a-Service for reinforcement learning of multi-turn LLM agents, on Apache Arrow.

    client = prorl.connect("prorl-runs")  # the root of `prorl serve`
    client.create_run(run_id="mine", filter="dapo", delivery="stream")
    client.submit("mine", prorl.load_tasks("tasks.jsonl"), n=8, last=True)
    for batch in client.stream("mine"):
        ...

The names below are all that is public here; each loads its module when it is first used, so that
`import prorl` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl.client import Client, PackedBatch, connect
    from prorl.config import RunConfig, ServiceConfig
    from prorl.errors import ProrlError
    from prorl.tasks import load_tasks
    from prorl.types import Message, RolloutLimits, SamplingParams, Task
    from prorl.view.notebook import open_runs as open

    __version__: str

_HOMES = {
    "Client": "prorl.client",
    "Message": "prorl.types",
    "PackedBatch": "prorl.client",
    "ProrlError": "prorl.errors",
    "RolloutLimits": "prorl.types",
    "RunConfig": "prorl.config",
    "SamplingParams": "prorl.types",
    "ServiceConfig": "prorl.config",
    "Task": "prorl.types",
    "connect": "prorl.client",
    "load_tasks": "prorl.tasks",
    "open": "prorl.view.notebook",
}

_RENAMED = {"open": "open_runs"}
"""Here a short name, at home one that hides no builtin."""

__all__ = [
    "Client",
    "Message",
    "PackedBatch",
    "ProrlError",
    "RolloutLimits",
    "RunConfig",
    "SamplingParams",
    "ServiceConfig",
    "Task",
    "__version__",
    "connect",
    "load_tasks",
    "open",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("prorl")
    if name not in _HOMES:
        raise AttributeError(f"module 'prorl' has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if (error.name or "prorl").partition(".")[0] == "prorl":
            raise
        raise ModuleNotFoundError(
            f"prorl.{name} needs {error.name}: install prorl's extra `serve`", name=error.name
        ) from None
    return getattr(home, _RENAMED.get(name, name))


def __dir__() -> list[str]:
    return __all__
