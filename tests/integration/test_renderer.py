"""A run with a model's own chat template, from its config to the stored ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.cli.summary import summarise
from prorl.errors import ProrlError
from prorl.tokenizer import HFTokenizer
from prorl.types import Json
from tests.integration.run_checks import check_complete, rows
from tests.renderer.small_model import TEMPLATE, write_model

Make = Callable[..., JobPlan]
INLINE = "service.workers=0"


async def test_a_run_speaks_its_models_template(
    make_plan: Make, demo_rows: list[dict[str, Json]], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    plan = make_plan(demo_rows[:2], INLINE, f"run.renderer.model={model}", policy="oracle")
    assert await run_plan(plan, json=True) == 0
    stored = check_complete(plan.directory, 2)
    assert summarise(plan.directory)["mean_reward"] == 1.0
    manifest = orjson.loads((plan.directory / "manifest.json").read_bytes())
    assert manifest["renderer"]["family"] == "hermes"
    assert len(manifest["renderer"]["template_sha256"]) == 64
    ids = rows(stored, "select token_ids from sequences order by sequence_id limit 1")[0]
    text = HFTokenizer(model).decode(np.array(ids["token_ids"], dtype=np.int32))
    assert "Tools, one a line:\n{" in text
    assert "</tool_response><|im_end|>\n<|im_start|>assistant\n" in text
    rows_of_calls = rows(stored, "select tool_calls from messages where role = 'assistant'")
    calls = [call for row in rows_of_calls for call in orjson.loads(row["tool_calls"])]
    assert calls
    assert all('"name"' in call["text"] for call in calls)


async def test_a_model_that_cannot_be_proved_is_refused_before_the_run(
    make_plan: Make, demo_rows: list[dict[str, Json]], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", TEMPLATE + "<|im_start|><|foreign|>")
    plan = make_plan(demo_rows[:1], INLINE, f"run.renderer.model={model}", policy="oracle")
    with pytest.raises(ProrlError, match=r"<\|foreign\|>, which the tokenizer does not know"):
        await run_plan(plan, json=True)
    assert not plan.directory.exists()
