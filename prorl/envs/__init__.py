"""Envs: one task domain a file, and the one place that finds them by name.

Each implements `prorl.protocols.Env`.

| env | tools | scored by |
|---|---|---|
| math | python | rules for answers of mathematics; math-verify for references beyond them |
| code | bash, python, files | HumanEval-shaped tests, or programs with cases, in a fresh sandbox |
| stem | python | multiple choice, quantities with units, short texts |
| swe | bash, files | SWE-bench-shaped tests of a repository in a fresh sandbox |
| harbor | bash | a Harbor task's own tests, in a fresh sandbox |
| harbor_steps | bash | the same for tasks of several steps |
| arith | python | exact match; short texts for small policies (`prorl.tasks.generated`) |
| shop | price, python | exact match, after two or three calls that depend on each other |
| repair | bash, files | hidden tests of a mended module, one of a few lines, in a fresh sandbox |
| guest | - | a program of another framework, in an interpreter of its own, says the reward |
| noop | - | always 1; no sandbox, for benches and tests |

An env of your own is an entry point of the group `prorl.envs` whose value is a class (or function)
that takes no arguments and gives an Env.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl import plugins
from prorl.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl.protocols import Env

BUILT_IN: Mapping[str, str] = {
    "math": "prorl.envs.math:MathEnv",
    "code": "prorl.envs.code:CodeEnv",
    "swe": "prorl.envs.swe:SweEnv",
    "stem": "prorl.envs.stem:StemEnv",
    "harbor": "prorl.envs.harbor:HarborEnv",
    "harbor_steps": "prorl.envs.harbor.steps:HarborStepsEnv",
    "arith": "prorl.envs.arith:ArithEnv",
    "shop": "prorl.envs.arith:ShopEnv",
    "repair": "prorl.envs.repair:RepairEnv",
    "guest": "prorl.envs.guest:GuestEnv",
    "noop": "prorl.envs.noop:NoopEnv",
}

ENTRY_POINTS = "prorl.envs"

_PARTS = (
    "check",
    "sandbox",
    "tools",
    "messages",
    "prepare",
    "call",
    "artifact",
    "score",
    "reference",
)
"""Methods of `prorl.protocols.Env`."""


def get_env(name: str) -> Env:
    """A fresh env by name; built-in names win.

    Raises TaskError with the nearest name, or what a user's one lacks.
    """
    env: Env = plugins.make(ENTRY_POINTS, name, TaskError, BUILT_IN)
    if lacking := [part for part in _PARTS if not callable(getattr(env, part, None))]:
        raise TaskError(
            f"env {name!r} has no {', '.join(lacking)}",
            "the methods of an env",
            "derive it from prorl.envs.base.BaseEnv",
        )
    return env
