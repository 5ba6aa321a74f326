"""Other people's trainers over prorl's stream, one file each, importing the trainer only inside."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from prorl.errors import UserError

if TYPE_CHECKING:
    from prorl.client.records import Feed, Record

TESTED_VERSIONS = {"trl": "1.16", "verl": "0.9", "tinker": "0.38", "skyrl": "0.4"}
"""The version that each adapter was tested with. Trainers that come from git have none, and no row:
the adapters of slime and prime-rl do not call `check_version`.
"""

METRIC_NAMES = {
    "actor/pg_loss": "loss",
    "actor/kl_loss": "kl",
    "actor/ppo_kl": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "policy/policy_loss": "loss",
    "policy/policy_kl": "kl",
    "policy/policy_entropy": "entropy",
    "policy/raw_grad_norm": "grad_norm",
}
"""verl's and SkyRL's names -> ours; TRL's are ours."""


def metrics_of(logged: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what a trainer logs of a step, under our names where the viewer has some.

    >>> metrics_of({"actor/pg_loss": 0.5, "timing_s/gen": 2.0, "note": "x"})
    {'loss': 0.5, 'timing_s/gen': 2.0}
    """
    return {
        METRIC_NAMES.get(name, name): float(value)
        for name, value in logged.items()
        if isinstance(value, Real) and not isinstance(value, bool)
    }


def metrics_callback(feed: Feed, waited_s: Callable[[], float] | None = None) -> Any:
    """A `transformers.TrainerCallback` that stores with the run what TRL logs. `waited_s`: seconds
    for which the trainer has waited for groups up to now.
    """
    from transformers import TrainerCallback

    class Metrics(TrainerCallback):
        _before = (time.monotonic(), 0.0)

        def on_log(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            logs = arguments["logs"]
            if not state.is_world_process_zero or "loss" not in logs:  # the last one sums up
                return
            values = metrics_of(logs)
            if waited_s is not None:
                (began, waited_before), self._before = self._before, (time.monotonic(), waited_s())
                took_s, waited = self._before[0] - began, self._before[1] - waited_before
                values["idle_share"] = waited / took_s if took_s > 0 else 0.0
            feed.log(state.global_step, values)

    return Metrics()


@cache
def check_version(package: str) -> None:
    """Warns in one line where a trainer has another version than its adapter was tried with."""
    try:
        installed = version(package)
    except PackageNotFoundError:  # on the path, not installed
        return
    if installed.split(".")[:2] != TESTED_VERSIONS[package].split("."):
        warnings.warn(
            f"{package} {installed}: prorl's adapter was tried with {TESTED_VERSIONS[package]};"
            " tests/trainer/test_adapters.py says whether it fits (make test-adapters)",
            stacklevel=3,
        )


def check_temperature(records: Iterable[Record], temperature: float | None, setting: str) -> None:
    """Raise UserError for a token that trains and was sampled at another temperature than the
    trainer computes its ratios at; None: the trainer takes each token's own, above 0.

    `setting`: what the trainer calls it. A run that trains has one temperature (the gateway sees to
    it), so that the mistake is in the trainer's settings, or the run is one of an evaluation.
    """
    for record in records:
        sampled = np.unique(record.temperatures[record.mask])
        wrong = sampled[sampled <= 0 if temperature is None else sampled != np.float32(temperature)]
        if len(wrong):
            expected = "a temperature above 0" if temperature is None else f"{temperature:g}"
            raise UserError(
                f"rollout {record.rollout} sampled at temperature {wrong[0]:g}",
                f"{expected}, as {setting} has it: at another one its ratios are not the policy's",
                f"set {setting} to the run's temperature; greedy rollouts cannot train",
            )


def num_sequences(records: Iterable[Record]) -> dict[int, int]:
    """Returns how many sequences that train each rollout has."""
    rollouts = [record.rollout for record in records if record.weight]
    return {rollout: rollouts.count(rollout) for rollout in rollouts}
