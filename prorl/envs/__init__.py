"""Envs: one task domain a file, each implementing `prorl.protocols.Env`, and the one place that finds them by name.

| env | tools | scored by |
|---|---|---|
| math | python | number or text match of the final answer; math-verify where it is installed |
| code | bash, python, files | HumanEval-shaped tests in a fresh sandbox |
| arith | python | exact match; short texts for small policies (`prorl.tasks.generated`) |
| shop | price, python | exact match, after two or three calls that depend on each other |
| noop | - | always 1; no sandbox, for benches and tests |

Your own: an entry point of the group `prorl.envs` whose value is a class (or function) that takes no arguments and gives an Env.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from prorl.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.protocols import Env

BUILT_IN: Mapping[str, str] = {
    "math": "prorl.envs.math:MathEnv",
    "code": "prorl.envs.code:CodeEnv",
    "arith": "prorl.envs.arith:ArithEnv",
    "shop": "prorl.envs.shop:ShopEnv",
    "noop": "prorl.envs.noop:NoopEnv",
}

ENTRY_POINTS = "prorl.envs"


def get_env(name: str) -> Env:
    """A fresh env by name; built-in names win. Raises TaskError with the nearest name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: Env = getattr(import_module(module), attribute)()
        return built_in
    users = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in users:
        user: Env = users[name].load()()
        return user
    known = sorted({*BUILT_IN, *users})
    near = difflib.get_close_matches(name, known, n=1)
    mend = f"did you mean {near[0]!r}?" if near else f"register your own as an entry point of the group {ENTRY_POINTS!r}"
    raise TaskError(f"unknown env {name!r}", f"one of {', '.join(known)}", mend)
