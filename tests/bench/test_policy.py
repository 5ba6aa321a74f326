"""`prorl bench policy`: its rows, with a rival and without; nothing here is timed."""

from __future__ import annotations

import pytest

from prorl.bench.policy import SAMPLED_TOKENS, Round, _row, child


def test_rates_are_medians_over_rounds_and_the_ratio_is_ours_over_theirs() -> None:
    ours = [Round(seconds, 0.5) for seconds in (1.0, 2.0, 4.0)]
    row = _row(8, ours, [Round(8.0, 1.0)] * 3, "")
    assert (row.what, row.value, row.rival_value, row.ratio) == (
        "tokens_per_s_8",
        4 * SAMPLED_TOKENS,
        SAMPLED_TOKENS,
        4.0,
    )
    assert (
        row.note == f"{16 * SAMPLED_TOKENS:,} tokens per CPU second, rival {8 * SAMPLED_TOKENS:,}"
    )


def test_a_rival_that_is_not_installed_is_a_reason() -> None:
    row = _row(1, [Round(1.0, 1.0)], [], "not installed: transformers")
    assert (row.rival_value, row.ratio, row.note) == (None, None, "not installed: transformers")


async def test_a_process_that_ends_is_told_from_one_that_answers() -> None:
    async with child("json.tool", "--help") as ended:
        with pytest.raises(RuntimeError, match="ended"):
            await ended.line(10.0)
