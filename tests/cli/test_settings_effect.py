"""A setting that a command would ignore is refused by it, wherever it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prorl.cli.settings import EFFECTIVE, Job, assignment, job_settings
from prorl.config import RunConfig, ServiceConfig
from prorl.errors import ConfigError

REFUSED = {
    "run": {"service.token", "service.gateway", "service.load_code"},
    "eval": {"service.token", "service.load_code"},
    "serve": {
        "run.filter",
        "run.renderer.model",
        "run.sampling.temperature",
        "tasks",
        "n",
        "limit",
        "greedy",
        "env",
        "name",
        "skip_invalid",
        "service.socket_dir",
    },
    "node": {"run.filter", "policy", "tasks", "service.backends", "service.http_port"},
    "cluster": {"run.filter", "policy", "tasks", "service.root", "service.store.url"},
}
ACCEPTED = {
    "run": {"run.filter", "n", "tasks", "service.run.slots", "service.tokenizer"},
    "eval": {"run.sampling.temperature", "policy", "service.sandbox.kind"},
    "serve": {"policy", "service.tokenizer", "service.load_code", "service.run.slots"},
    "node": {"service.run.slots", "service.sandbox.images", "service.drain_s"},
    "cluster": {"service.run.slots", "service.workers"},
}


@pytest.mark.parametrize(
    ("command", "key"),
    [(command, key) for command, keys in REFUSED.items() for key in sorted(keys)],
)
def test_a_setting_without_effect_is_refused(command: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no effect on `prorl {command}`"):
        job_settings(command, None, {}, [f"{key}=1"])
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(assignment(f"{key}=1")))
    with pytest.raises(ConfigError, match=r"settings\.yaml: .* has no effect"):
        job_settings(command, file, {}, [])


@pytest.mark.parametrize("command", EFFECTIVE)
def test_every_key_is_refused_or_accepted_by_each_command(command: str) -> None:
    """No key is unknown to the table, and what a command is documented to take has an effect."""
    keys = {("service", key) for key in ServiceConfig.model_fields}
    keys |= {("run", key) for key in RunConfig.model_fields}
    keys |= {(key, "") for key in Job.model_fields if key not in ("service", "run")}
    verdicts = {key: EFFECTIVE[command](*key) for key in keys}
    assert any(verdicts.values())
    for key in ACCEPTED[command]:
        section, _, below = key.partition(".")
        assert verdicts[section, below.partition(".")[0]], key
    for key in REFUSED[command]:
        section, _, below = key.partition(".")
        assert not verdicts[section, below.partition(".")[0]], key
