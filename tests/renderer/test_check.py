"""A run's model is made and proved in a process of its own, before the run is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.config.renderer import RendererSpec
from prorl.errors import ConfigError
from prorl.renderer.check import check
from tests.renderer.small_model import TEMPLATE, write_model

DAY_S = 86400.0


async def test_the_properties_of_a_template_are_returned(tmp_path: Path) -> None:
    spec = RendererSpec(model=str(write_model(tmp_path)), variables={"enable_thinking": False})
    facts = await check(spec)
    assert facts["family"] == "hermes"
    assert facts["thinks"] is False
    assert (await check(RendererSpec(model="bytes")))["renderer"] == "ChatMLRenderer"


async def test_a_refusal_is_a_single_error(tmp_path: Path) -> None:
    spec = RendererSpec(model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="unknown tokenizer"):
        await check(spec)


@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s * 2 %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'x' %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
async def test_a_hostile_template_is_refused(tmp_path: Path, loop: str) -> None:
    directory = write_model(tmp_path, loop + TEMPLATE)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await check(RendererSpec(model=str(directory)))


def test_a_runs_spec_has_the_services_model_and_the_first_day() -> None:
    spec = RendererSpec(on_history_rewrite="segment").settled("/models/a", 2 * DAY_S + 1.0)
    assert (spec.model, spec.date, spec.on_history_rewrite) == (
        "/models/a",
        "1970-01-03",
        "segment",
    )
    own = RendererSpec(model="/models/b", date="2026-11-22").settled("/models/a", 0.0)
    assert (own.model, own.date) == ("/models/b", "2026-11-22")
    assert RendererSpec.from_json(own.to_json()) == own
