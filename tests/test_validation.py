"""Tests that a refusal of pydantic is said in the words of this project."""

from __future__ import annotations

from typing import Any

import pytest

from prorl.config import RunConfig, parse
from prorl.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "body: no `run_id`; expected a value: it is required"),
        ({"run_id": 5}, "body: `run_id` = 5; expected text"),
        ({"sampling": {"temperature": "hot"}}, "`sampling.temperature` = 'hot'; expected a number"),
        ({"sampling": {"max_tokens": 1.5}}, "`sampling.max_tokens` = 1.5; expected a whole number"),
        ({"sampling": {"temperature": float("nan")}}, "expected a finite number"),
        ({"sampling": {"top_p": 3}}, "`sampling.top_p` = 3; expected 1.0 or less"),
        (
            {"delivery": "stream", "sampling": {"top_k": 20}},
            "expected for delivery `stream`: a temperature above 0, top_p 1 and top_k 0",
        ),
        ({"sampling": None}, "`sampling` = None; expected a mapping"),
        ({"limits": {"max_turns": 1 << 70}}, "whole numbers of at most 64 bits"),
        ({"limits": {"max_turns": 0}}, "`limits.max_turns` = 0; expected 1 or more"),
        ({"delivery": "quick"}, "`delivery` = 'quick'; expected one of 'store' or 'stream'"),
        ({"backends": "http://x"}, "`backends` = 'http://x'; expected a list"),
        ({"oops": 1}, "unknown key `oops`; expected a known key; see `prorl schema --config`"),
        ({"target_group": 1}, "did you mean `target_groups`?"),
    ],
)
def test_a_refused_value_is_named_with_what_was_expected(values: Any, expected: str) -> None:
    body = values if not values or "run_id" in values else {"run_id": "r", **values}
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, body, "body")
    assert expected in str(caught.value)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, {"run_id": ["x" * 10_000]}, "body")
    assert len(str(caught.value)) < 300
