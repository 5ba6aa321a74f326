"""The demo's toy behind `prorl serve`, for whoever trains it, and how good it is held out."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow

from prorl.backends.embedded import TOY
from prorl.cli.demo.recipe import LIMITS
from prorl.client import Client, connect
from prorl.config import Sampling
from prorl.sandbox import kinds
from prorl.types import Json, Task

PYTHON = Path(pyarrow.__file__).parents[4] / "bin" / "python"
"""The service's interpreter: the environment for adapters borrows its packages, and sandboxes start
interpreters that heed no PYTHONPATH.
"""
SAMPLING = Sampling(temperature=1.0, max_tokens=64)


@contextmanager
def toy_service(root: Path) -> Iterator[Client]:
    """A service whose model server has the toy's weights."""
    settings = {"tokenizer": TOY, "run.slots": 64, "eval.slots": 16, "store.flush_s": 1.0}
    settings["sandbox.kind"] = kinds.lightest()
    sets = [word for key, value in settings.items() for word in ("--set", f"service.{key}={value}")]
    command = [str(PYTHON), "-m", "prorl.cli", "serve", "--root", str(root), *sets]
    command += ["--policy", f"embedded:{TOY}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), "the service did not start"
        try:
            with connect(root) as client:
                yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()


def evaluate_heldout(
    client: Client, run: str, tasks: Sequence[Task], weights: Path | None = None, *, seed: int = 0
) -> float:
    """Mean reward of these weights, or of those that serve, one rollout a task."""
    how: dict[str, Json] = {"seed": seed, "limits": LIMITS.model_dump(mode="json")}
    client.create_run(run_id=run, delivery="store", **how)
    if weights is not None:
        client.publish(run, 1, weights)
    status = client.evaluate(run, tasks, sampling=SAMPLING.params(), **how)
    return float(status["mean_reward"])
