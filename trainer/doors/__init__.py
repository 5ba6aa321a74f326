"""Other people's trainers over prorl's stream, one file each, importing the trainer only inside."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

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
