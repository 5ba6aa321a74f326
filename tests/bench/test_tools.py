"""Rivals of the tool server: a row with its reason where one is not installed."""

from __future__ import annotations

import math
import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest

from prorl.bench.tools import REX, rival

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
BRINGS_GPL = ("swe-rex", "bashlex")
"""Seen once, by their metadata, where they were installed."""


def test_a_rival_that_is_not_installed_is_a_row_with_its_reason() -> None:
    row = rival("swe_rex_local_p50_ms", None, 100.0, 0.4, REX)
    assert math.isnan(row.value)
    assert "bashlex" in row.note
    row = rival("swe_rex_local_p50_ms", [100.0, 120.0, 110.0], 100.0, 0.5, REX)
    assert (row.value, row.ratio) == (110.0, 220.0)


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_no_extra_brings_a_copyleft_package(extra: str) -> None:
    """The packages are those that are installed here: each requirement, and what it requires in
    turn.
    """
    seen: set[str] = set()
    named = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in named:
        assert not requirement.startswith(BRINGS_GPL)
        _walk(requirement, seen)
    assert not {name: _licence(name) for name in seen if _is_copyleft(_licence(name))}


def _walk(requirement: str, seen: set[str]) -> None:
    name_match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name_match
    name = name_match[0].lower().replace("_", "-")
    try:
        further = requires(name) or []
    except PackageNotFoundError:
        return
    if name not in seen:
        seen.add(name)
        for each in further:
            if "extra ==" not in each:
                _walk(each, seen)


def _licence(name: str) -> str:
    about = metadata(name)
    expressions, classes, texts = (
        about.get_all(field) or [] for field in ("License-Expression", "Classifier", "License")
    )
    short = expressions or [text for text in classes if text.startswith("License")] or texts
    return "; ".join(map(str, short))


def _is_copyleft(licence: str) -> bool:
    """The GNU GPL and AGPL; what is offered under another licence, too, is taken under that."""
    return bool(re.search(r"(?<!L)GPL", licence)) and " OR " not in licence
