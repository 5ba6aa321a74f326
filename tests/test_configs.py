"""Tests that the files of `configs/` for machines that are not ours are accepted by what reads them
there.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl.cli.app import build
from prorl.cli.settings import check_model, job_settings, service_settings

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("unit", "name", "arguments"),
    [
        ("prorl.service", "serve", {"root", "config"}),
        ("prorl-gc.service", "gc", {"root", "drop", "older_than_days"}),
    ],
)
def test_a_unit_starts_a_command_line_that_exists(
    unit: str, name: str, arguments: set[str]
) -> None:
    line = re.search(r"^ExecStart=(.*)$", (CONFIGS / unit).read_text(), re.M)
    assert line
    command, bound, ignored = build().parse_args(
        shlex.split(line[1])[1:], exit_on_error=False, print_error=False
    )[:3]
    assert command.__name__ == name
    assert set(bound.arguments) >= arguments
    assert not ignored


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    units = [*CONFIGS.glob("prorl*.service"), *CONFIGS.glob("prorl*.timer")]
    assert len(units) == 3
    for unit in units:
        text = unit.read_text().replace("/opt/prorl/bin/prorl", sys.executable)
        (tmp_path / unit.name).write_text(text.replace("=prorl\n", "=root\n"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / unit.name for unit in units)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not [line for line in done.stderr.splitlines() if "prorl" in line], done.stderr
    assert done.returncode == 0, done.stderr


LOGROTATE = shutil.which("logrotate", path="/usr/sbin:/usr/bin")


@pytest.mark.skipif(LOGROTATE is None, reason="no logrotate here")
def test_logrotate_cuts_the_log_of_a_process_that_writes_on(tmp_path: Path) -> None:
    """The process has its file open as a supervisor opens it, to append."""
    (tmp_path / "logs").mkdir(mode=0o700)
    log = tmp_path / "logs" / "service.log"
    lines = (CONFIGS / "logrotate.conf").read_text().replace("/srv/prorl/runs", str(tmp_path))
    lines = re.sub(r"(?m)^    su .*\n", "", lines).replace("size 100M", "size 1k")
    (tmp_path / "conf").write_text(lines)
    (tmp_path / "conf").chmod(0o644)
    assert LOGROTATE
    with log.open("ab", buffering=0) as file:
        for number in range(1, 4):
            file.write(b"%d" % number * 2000)
            words = [LOGROTATE, "--state", str(tmp_path / "state"), str(tmp_path / "conf")]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        file.write(b"last\n")
    assert log.read_bytes() == b"last\n"
    assert (tmp_path / "logs" / "service.log.1").read_bytes() == b"3" * 2000
    rotated = sorted(path.name for path in log.parent.iterdir())
    assert rotated == [f"service.log{end}" for end in ("", ".1", ".2.gz", ".3.gz")]


def instructions() -> list[tuple[str, str]]:
    text = (CONFIGS / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return [(name, rest.strip()) for name, _, rest in lines]


def test_the_container_file_copies_what_there_is_and_installs_extras_that_exist() -> None:
    extras = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]
    lines = instructions()
    copied = [word for name, rest in lines if name == "COPY" for word in rest.split()[:-1]]
    assert all((CONFIGS.parent / word).exists() for word in copied)
    links = [path for path in (CONFIGS.parent / "prorl").iterdir() if path.is_symlink()]
    assert links
    assert {path.resolve().name for path in links} <= set(copied), "what prorl/ links to goes along"
    extras_match = re.search(
        r"/src\[(.*?)\]", " ".join(rest for name, rest in lines if name == "RUN")
    )
    assert extras_match
    assert set(extras_match[1].split(",")) <= set(extras["optional-dependencies"])


@pytest.mark.parametrize("kind", ["CMD", "HEALTHCHECK"])
def test_the_container_runs_commands_that_exist(kind: str) -> None:
    (rest,) = (rest for name, rest in instructions() if name == kind)
    words = json.loads(rest[rest.index("[") :])
    words = words[1:] if words[0] == "prorl" else words
    command, bound, ignored = build().parse_args(words, exit_on_error=False, print_error=False)[:3]
    assert command.__name__ == words[0]
    assert "root" in bound.arguments
    assert not ignored


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / "prorl.yaml").read_text()))


def test_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate: the schemas"
    )
    for manifest in manifests():
        validate.validate(manifest, "1.31", strict=True)


def test_the_manifest_says_command_lines_that_exist() -> None:
    command_lines = [
        [str(word) for word in container["args"]]
        for manifest in manifests()
        if "template" in manifest["spec"]
        for container in manifest["spec"]["template"]["spec"]["containers"]
    ]
    assert [words[0] for words in command_lines] == ["serve", "node"]
    for words in command_lines:
        ignored = build().parse_args(words, exit_on_error=False, print_error=False)[2]
        assert not ignored


def test_the_service_of_the_manifest_accepts_its_model_server() -> None:
    words = [
        str(word) for word in manifests()[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    ]
    flags = build().parse_args(words, exit_on_error=False, print_error=False)[1].arguments
    values = job_settings("serve", None, {"policy": flags["policy"]}, flags["set_"]).service
    check_model(values, service_settings(values, flags["root"], flags["policy"]), "")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SLURM_JOB_ID": "4711"}, "n-4711-0"),
        ({"SLURM_JOB_ID": "2", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}, "n-1_1-0"),
    ],
)
def test_a_node_of_slurm_has_the_number_that_squeue_prints(
    variables: dict[str, str], name: str, tmp_path: Path
) -> None:
    """A real Slurm plays the script in `tests/cluster/test_slurm.py`."""
    commands = {"squeue": "echo 4:00:00", "srun": 'shift; SLURM_PROCID=0 exec "$@"'}
    for command, text in {**commands, "prorl": 'echo "$@"'}.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    output = subprocess.run(
        ["bash", str(CONFIGS / "slurm-node.sh"), "node.json", "--set", "a=b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.split() == [
        *("node", "node.json", "--name", name),
        *("--walltime", "4:00:00", "--set", "a=b"),
    ]
