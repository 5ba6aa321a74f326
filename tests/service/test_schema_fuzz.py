"""Requests made from our own OpenAPI schema, right and wrong, `PRORL_CASES` of them: no 5xx, no
hang, no status and no shape that the schema does not have.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.running_gateway import TOKEN, running_gateway

CASES = int(os.environ.get("PRORL_CASES", "400"))
EXAMPLES = max(5, CASES // 50)
"""Of each route and mode in a round."""

HANG_S = 60.0
"""An answer that takes longer, even on a loaded machine, is a hang."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_requests_made_from_the_schema_are_answered_as_it_says(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("store"):
        await w.run("r")
        counts = await asyncio.to_thread(_fuzz, w.served.http)
    print(f"{sum(counts.values()):,} requests: {dict(sorted(counts.items()))}")
    assert sum(counts.values()) >= CASES
    assert not [status for status in counts if status >= 500]


def _fuzz(url: str) -> Counter[int]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    schema: Any = schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=headers)
    operations: list[Any] = [entry.ok() for entry in schema.get_all_operations()]
    counts: Counter[int] = Counter()

    def send(case: Any) -> None:
        if "run_id" in (case.path_parameters or {}) and counts.total() % 2:
            case.path_parameters["run_id"] = "r"
        answer = case.call(headers=headers, timeout=HANG_S)
        counts[answer.status_code] += 1
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        case.validate_response(
            answer, checks=[status_code_conformance, response_schema_conformance]
        )

    while counts.total() < CASES:
        for operation, mode in itertools.product(operations, GenerationMode):
            # A route without parameters has nothing that could be wrong.
            with suppress(Unsatisfiable):
                rules = settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                rules(given(operation.as_strategy(generation_mode=mode))(send))()  # type: ignore[no-untyped-call]
    return counts
