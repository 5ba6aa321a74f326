"""Settings: precedence, and one clear line for each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl.cli.settings import (
    Job,
    assignment,
    backend,
    job_settings,
    run_settings,
    service_settings,
)
from prorl.errors import ConfigError


def test_flag_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("n: 2\nservice: {model: file, eval: {own_processes: 2}, init: {slots: 1}}")
    monkeypatch.setenv("PRORL_INIT__SLOTS", "5")
    monkeypatch.setenv("PRORL_MODEL", "environment")
    job = job_settings("run", config, {"n": None, "policy": "noop"}, ["service.model=flag"])
    service = service_settings(job.service, tmp_path, job.policy)
    assert (job.n, job.policy) == (2, "noop")
    assert (service.init.slots, service.eval.own_processes, service.model) == (5, 2, "flag")
    assert service.backends == ("scripted:noop",)


def test_the_token_and_the_socket_folder_never_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRORL_TOKEN", "secret")
    monkeypatch.setenv("PRORL_SOCKET_DIR", "/elsewhere")
    assert job_settings("run", None, {}, []).service == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("polcy: oracle", "unknown key `polcy`; expected a known key; did you mean `policy`?"),
        ("n: many", "`n` = 'many'; expected a whole number"),
        ("slots: 3", "expected"),
        ("http_port: 3", "did you mean `service.http_port`?"),
        ("- a\n- b", "holds list; expected a mapping of settings"),
        ("n: [", "expected valid YAML"),
        ("# nothing", "c.yaml is empty; expected a mapping of settings"),
        ("run: {seed: 3}\nservice: {}\nrun: {}", "line 3: the key `run` a second time; expected"),
        ('{"run": {"seed": 3, "seed": 4}}', "line 1: the key `seed` a second time; expected"),
    ],
)
def test_a_wrong_config_file_is_refused_in_a_single_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        job_settings("run", config, {}, [])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_keys_of_the_sections_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key `sampling.temprature`; .*did you mean `temperature`\?"
    ):
        run_settings({"sampling": {"temprature": 1}}, "r")
    with pytest.raises(ConfigError, match="run name 'logs'; expected none of"):
        run_settings({}, "logs")
    with pytest.raises(ConfigError, match="letters, digits"):
        run_settings({}, "../r")


def test_set_takes_a_path_and_a_yaml_value() -> None:
    assert assignment("run.seed=7") == {"run": {"seed": 7}}
    assert assignment("service.backends=[a, b]") == {"service": {"backends": ["a", "b"]}}
    command = "command: python3 @loop.py"
    assert assignment(f"run.agent={command}") == {"run": {"agent": command}}
    assert assignment("run.limits={max_turns: 3}") == {"run": {"limits": {"max_turns": 3}}}
    for wrong in ("run.seed", "=3", "run..seed=3"):
        with pytest.raises(ConfigError, match="expected KEY=VALUE"):
            assignment(wrong)


def test_a_policy_is_the_name_of_a_kind_or_an_address() -> None:
    assert backend("flaky?p=0.3") == "scripted:flaky?p=0.3"
    assert backend("http://host:1") == "http://host:1"


def test_a_folder_of_checkpoints_names_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "config.json").write_text("{}")
        os.utime(tmp_path / f"step-{step}" / "config.json", (step, step))
    with pytest.raises(ConfigError, match=r"a folder of 2; expected one .* newest is \S+step-2"):
        backend(str(tmp_path))


def test_groups_of_four_by_default_only_where_rollouts_differ() -> None:
    assert [
        Job(policy=policy).num_samples
        for policy in ("oracle", "flaky", "flaky?p=0.4", "http://h:1")
    ] == [1, 4, 4, 1]
    assert Job(policy="flaky", n=2).num_samples == 2


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_is_short_valid_and_opens_with_its_command(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# prorl ")
    if path.name != "demo.yaml":  # a recipe: tests/cli/test_demo.py
        job = job_settings(lines[0].split()[2], path, {}, [])
        service_settings(job.service, None, job.policy)
        run_settings(job.run, "r")
