"""Other people's trainers over prorl's stream, one file each, importing the trainer only inside."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import numpy as np

from prorl.errors import UserError

if TYPE_CHECKING:
    from prorl.client.records import Record

TRIED = {"trl": "1.16", "verl": "0.9", "tinker": "0.38", "skyrl": "0.4"}
"""With which each door was tried; slime and prime-rl are taken from their git, without one."""


@cache
def check_version(package: str) -> None:
    """One line where a trainer is of another version than its door was tried with."""
    try:
        found = version(package)
    except PackageNotFoundError:  # on the path, not installed
        return
    if found.split(".")[:2] != TRIED[package].split("."):
        warnings.warn(
            f"{package} {found}: prorl's door was tried with {TRIED[package]};"
            " tests/trainer/test_doors.py says whether it fits (make test-doors)",
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
    """How many sequences that train each rollout has."""
    rollouts = [record.rollout for record in records if record.weight]
    return {rollout: rollouts.count(rollout) for rollout in rollouts}
