"""Reads a verifier's reward files as Harbor reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from prorl.types import RewardPart

TRAINS = "reward"
"""The reward that trains; other keys of reward.json are parts of weight 0."""


class NoRewardError(Exception):
    """The verifier left no reward that counts; the message says why."""


def parts_of(files: Mapping[str, str]) -> tuple[RewardPart, ...]:
    """The rewards of `reward.json`, else of `reward.txt`. Raises NoRewardError.

    A file that is there counts: a broken reward.json is not made good by reward.txt.

    >>> parts_of({"reward.txt": "0.5\\n"})
    (RewardPart(name='reward', value=0.5, weight=1.0),)
    >>> [part.weight for part in parts_of({"reward.json": '{"reward": 1, "style": 0.5}'})]
    [1.0, 0.0]
    """
    if "reward.json" in files:
        rewards = _read_json(files["reward.json"])
    elif "reward.txt" in files:
        rewards = {TRAINS: _number(files["reward.txt"])}
    else:
        raise NoRewardError("the verifier wrote neither reward.json nor reward.txt")
    if TRAINS not in rewards:
        raise NoRewardError(f"reward.json has {', '.join(rewards) or 'no keys'}, and no `{TRAINS}`")
    return tuple(
        RewardPart(name=name, value=value, weight=float(name == TRAINS))
        for name, value in rewards.items()
    )


def parts_of_summary(files: Mapping[str, str]) -> tuple[RewardPart, ...]:
    """1 where pytest's summary has passed tests and no other, as terminal-bench 1 reads it. Raises
    NoRewardError where it has none.
    """
    num_passed, num_failed = (int(files.get(name, "0")) for name in ("passed", "failed"))
    if not num_passed + num_failed:
        raise NoRewardError("the tests printed no summary of pytest's")
    return (RewardPart(name=TRAINS, value=float(not num_failed)),)


def _read_json(text: str) -> dict[str, float]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise NoRewardError(f"reward.json is {text[:60]!r}, no object of numbers")
    for name, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise NoRewardError(f"reward.json: {name} is {value!r:.60}, no finite number")
    return {name: float(value) for name, value in values.items()}


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise NoRewardError(f"reward.txt is {text[:60]!r}, no finite number")
    return value
