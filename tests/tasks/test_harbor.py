"""Harbor's task folders: what is read, and one clear line for each broken one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.cli.job import with_task_limits
from prorl.config import Limits, RunConfig, host_variables
from prorl.envs.harbor import HarborEnv
from prorl.errors import TaskError
from prorl.network_policy import network_of, read_network
from prorl.tasks import read_tasks
from prorl.types import Json, Stage
from tests.harbor_folders import STEPS, STEPS_TOML, TERMINAL_BENCH, TOML, make_folder

SERVICES = "services:\n  main: {build: .}\n"


def _toml(line: str, section: str = "environment") -> str:
    """The usual task.toml with a further line in a section, or at the top."""
    if not section:
        return f"{line}\n{TOML}"
    assert f"[{section}]\n" in TOML
    return TOML.replace(f"[{section}]\n", f"[{section}]\n{line}\n")


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_a_folder_is_read_in_each_version(tmp_path: Path, version: str) -> None:
    key = "version" if version < "1.3" else "schema_version"
    text = TOML.replace('schema_version = "1.3"', f'{key} = "{version}"')
    folder = make_folder(tmp_path / "add", **{"task.toml": text})
    (task,) = read_tasks(folder).tasks
    assert (task.task_id, task.env, task.prompt) == (
        "add",
        "harbor",
        "Write the sum of 2 and 3 into sum.txt.",
    )
    assert task.data["image"] == f"dockerfile:{folder / 'environment'}"
    assert task.data["sandbox"] == {"memory_bytes": 512 << 20, "overlay_bytes": 64 << 20}
    assert (task.data["agent_timeout_s"], task.data["verifier"]["timeout_s"]) == (120, 60.5)
    assert task.data["deviations"] == []


def test_every_key_of_the_format_is_read(tmp_path: Path) -> None:
    text = """schema_version = "1.4"
source = "here"
artifacts = ["/app/out", {source = "/app/model", exclude = ["*.tmp"]}]
[task]
name = "ours/every-key"
version = "2"
description = "All keys."
authors = [{name = "A"}]
keywords = ["k"]
[metadata.own]
anything = 1
[agent]
timeout_sec = 9
user = "root"
[verifier]
timeout_sec = 8
environment_mode = "separate"
[verifier.env]
LEVEL = "${LEVEL:-3}"
[verifier.environment]
memory_mb = 256
workdir = "/tests"
[verifier.environment.env]
SIDE = "verifier"
[environment]
build_timeout_sec = 7
docker_image = "registry.example/team/task:1"
cpus = 2
memory = "2G"
storage = "512M"
gpus = 0
mcp_servers = []
workdir = "/app"
allow_internet = false
[environment.env]
SIDE = "agent"
[environment.healthcheck]
command = "test -f /app/ready"
retries = 2
[solution.env]
FAST = "1"
"""
    instruction = "<!-- a canary line of the author -->\n# canary 42\n\nDo it.\n"
    folder = make_folder(tmp_path / "x", **{"task.toml": text, "instruction.md": instruction})
    (task,) = read_tasks(folder).tasks
    assert (task.task_id, task.prompt) == ("ours/every-key", "Do it.")
    expected: dict[str, Json] = {
        "image": "docker://registry.example/team/task:1",
        "build_timeout_s": 7,
        "workdir": "/app",
        "environment": {"SIDE": "agent"},
        "sandbox": {"memory_bytes": 2 << 30, "overlay_bytes": 512 << 20, "cpus": 2.0},
        "network": {
            "agent": {"network_mode": "no-network"},
            "verifier": {"network_mode": "public"},
        },
        "solution_environment": {"FAST": "1"},
        "deviations": [],
    }
    assert {key: task.data[key] for key in expected} == expected
    assert task.data["healthcheck"]["retries"] == 2
    assert [each["source"] for each in task.data["artifacts"]] == [
        "/logs/artifacts",
        "/app/out",
        "/app/model",
    ]
    verifier = task.data["verifier"]
    assert (verifier["image"], verifier["tests"]) == (task.data["image"], [["tests", "."]])
    assert (verifier["environment"], verifier["variables"]) == (
        {"LEVEL": "3"},
        {"SIDE": "verifier"},
    )
    assert (verifier["workdir"], verifier["sandbox"]) == ("/tests", {"memory_bytes": 256 << 20})
    make_folder(
        folder, **{"task.toml": text, "tests/Dockerfile": "FROM small\n", "tests/test.sh": "exit\n"}
    )
    (task,) = read_tasks(folder).tasks
    assert task.data["verifier"]["image"] == f"dockerfile:{folder / 'tests'}"
    assert task.data["verifier"]["tests"] == []


ALLOWED = 'network_mode = "allowlist"\nallowed_hosts = ["PyPI.org", "*.example.org"]'
HOSTS = {"network_mode": "allowlist", "allowed_hosts": ["PyPI.org", "*.example.org"]}


@pytest.mark.parametrize(
    ("text", "agent", "verifier"),
    [
        (TOML, "no-network", "no-network"),
        (TOML.replace('network_mode = "no-network"', "allow_internet = true"), "public", "public"),
        (TOML.replace('network_mode = "no-network"', ""), "public", "public"),
        (_toml('network_mode = "public"', "verifier"), "no-network", "public"),
        (_toml(ALLOWED, "agent"), HOSTS, "no-network"),
        (TOML.replace('network_mode = "no-network"', ALLOWED), HOSTS, HOSTS),
    ],
)
def test_each_phase_has_the_network_that_its_author_states(
    tmp_path: Path, text: str, agent: Json, verifier: Json
) -> None:
    """A phase that states none has that of its environment, and `public` is Harbor's default."""
    (task,) = read_tasks(make_folder(tmp_path / "a", **{"task.toml": text})).tasks
    assert task.data["deviations"] == []
    for stage, wish in ((Stage.RUN, agent), (Stage.EVAL, verifier)):
        assert network_of(task, stage) == read_network(wish, "expected")
    message = HarborEnv().messages(task)[0].content
    assert ("without network" in message) == (agent == "no-network")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ('colour = "red"\n' + TOML, "the key `colour` of task.toml is unknown"),
        (_toml("max_turns = 3", "agent"), "the key `agent.max_turns` of task.toml is unknown"),
        (_toml("disk_gb = 3"), "the key `environment.disk_gb` of task.toml is unknown"),
        (_toml('user = "nobody"', "agent"), "agent.user: a sandbox has one user"),
        (_toml('artifacts = ["/app/out"]', ""), "artifacts: a shared verifier"),
        (TOML + STEPS_TOML + 'artifacts = ["/app/out"]\n', "artifacts: a shared verifier"),
        (_toml('skills_dir = "/skills"'), "environment.skills_dir"),
    ],
)
def test_what_has_no_effect_is_reported_once_for_all_tasks(
    tmp_path: Path, text: str, reported: str
) -> None:
    for name in ("a", "b", "c", "d"):
        make_folder(tmp_path / name, **{**(STEPS if "steps" in text else {}), "task.toml": text})
    make_folder(tmp_path / "plain")
    (line,) = read_tasks(tmp_path).deviations
    assert line.startswith(f"4 of 5 tasks: {reported}")
    assert line.endswith("(a, b, c, ...)")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"task.toml": None}, "no task.toml"),
        ({"task.toml": "[agent"}, "task.toml is not TOML"),
        ({"task.toml": b"# \xff\n"}, "task.toml is not UTF-8"),
        ({"task.toml": "verifier = 3\n"}, "`verifier` = '3'; expected a table [verifier]"),
        ({"task.toml": 'version = "2.0"\n'}, "schema_version = '2.0'; expected one of 1.0"),
        (
            {"task.toml": _toml('[task]\nname = "no organisation"', "")},
            "expected ORGANISATION/NAME",
        ),
        (
            {"task.toml": "[verifier]\ntimeout_sec = -1\n"},
            "`verifier.timeout_sec` = -1; expected more than 0",
        ),
        (
            {"task.toml": '[agent]\ntimeout_sec = "soon"\n'},
            "`agent.timeout_sec` = 'soon'; expected a number",
        ),
        ({"task.toml": _toml("cpus = nan")}, "`environment.cpus` = nan"),
        ({"task.toml": _toml('memory = "much"')}, "memory = 'much' is no size"),
        ({"task.toml": _toml('memory = "2G"')}, "contradicts memory_mb = 512"),
        ({"task.toml": _toml('os = "windows"')}, "environment.os = 'windows': not supported"),
        ({"task.toml": _toml("gpus = 1")}, "a GPU or TPU in [environment]: not supported"),
        (
            {"task.toml": _toml('mcp_servers = [{name = "a", url = "http://a"}]')},
            "mcp_servers: not supported",
        ),
        (
            {"task.toml": _toml('workdir = "app"')},
            "environment.workdir = 'app'; expected an absolute",
        ),
        (
            {"task.toml": _toml('allowed_hosts = ["a.example"]')},
            "allowed_hosts with network_mode",
        ),
        (
            {"task.toml": _toml(ALLOWED.replace("PyPI.org", "10.0.0.0/8"), "agent")},
            "task.toml: agent: allowed_hosts: '10.0.0.0/8' is an address; expected a host's name",
        ),
        (
            {"task.toml": TOML.replace("no-network", "everything")},
            "`environment.network_mode` = 'everything'",
        ),
        (
            {"task.toml": TOML + "[environment.healthcheck]\nretries = 1\n"},
            "no `environment.healthcheck.command`",
        ),
        (
            {"task.toml": TOML + '[verifier.env]\nKEY = "${API_KEY}"\n'},
            "needs the host's variable API_KEY",
        ),
        ({"task.toml": TOML + STEPS_TOML}, "steps.name = 'one'; expected a folder steps/one"),
        (
            {**STEPS, "task.toml": TOML + STEPS_TOML.replace("two", "one")},
            "steps are called one, one; expected a name for each",
        ),
        ({**STEPS, "task.toml": TOML + STEPS_TOML.replace("two", "../x")}, "`steps.1.name`"),
        (
            {**STEPS, "task.toml": TOML + STEPS_TOML, "steps/two/instruction.md": None},
            "no steps/two/instruction.md",
        ),
        (
            {**STEPS, "task.toml": TOML + STEPS_TOML, "tests/test.sh": None},
            "no tests/test.sh",
        ),
        (
            {**STEPS, "task.toml": _toml('environment_mode = "separate"', "verifier") + STEPS_TOML},
            "a separate verifier with [[steps]]: not supported",
        ),
        (
            {
                **STEPS,
                "task.toml": f'{TOML}{STEPS_TOML}[steps.agent]\nnetwork_mode = "public"\n',
            },
            "a network of its own in the step 'two': not supported; expected that of the task's"
            " agent: no-network",
        ),
        (
            {
                **STEPS,
                "task.toml": f"{TOML}{STEPS_TOML}[steps.verifier]\n{ALLOWED}\n",
            },
            "a network of its own in the step 'two': not supported",
        ),
        (
            {
                **STEPS,
                "task.toml": f"{TOML}{STEPS_TOML}[steps.verifier.environment]\ncpus = 1\n",
            },
            "a separate verifier with [[steps]], in two: not supported",
        ),
        (
            {
                **STEPS,
                "task.toml": f'{TOML}{STEPS_TOML}[[steps.verifier.collect]]\ncommand = "x"\n',
            },
            "[[steps.verifier.collect]] in the step 'two': not supported",
        ),
        (
            {**STEPS, "task.toml": f'{TOML}{STEPS_TOML}min_reward = "much"\n'},
            "steps.1.min_reward",
        ),
        ({**TERMINAL_BENCH, "task.yaml": "a: [\n"}, "task.yaml cannot be read"),
        ({**TERMINAL_BENCH, "task.yaml": "words\n"}, "task.yaml holds 'words'"),
        ({**TERMINAL_BENCH, "task.yaml": "a: 1\n"}, "task.yaml: no `instruction`"),
        (
            {**TERMINAL_BENCH, "task.yaml": "instruction: x\nmax_test_timeout_sec: -1\n"},
            "`max_test_timeout_sec` = -1; expected more than 0",
        ),
        (
            {**TERMINAL_BENCH, "task.yaml": "instruction: x\nparser_name: swelancer\n"},
            "parser_name = 'swelancer': not supported",
        ),
        ({**TERMINAL_BENCH, "run-tests.sh": None}, "no run-tests.sh"),
        ({**TERMINAL_BENCH, "Dockerfile": None}, "no Dockerfile"),
        (
            {**TERMINAL_BENCH, "docker-compose.yaml": "services: {client: {}, server: {}}\n"},
            "docker-compose.yaml starts client, server: not supported",
        ),
        (
            {**TERMINAL_BENCH, "docker-compose.yaml": "services: {a: {build: ./client}}\n"},
            "build.context = './client': not supported",
        ),
        (
            {
                "task.toml": _toml(
                    'environment_mode = "shared"\nenvironment = {cpus = 1}', "verifier"
                )
            },
            "environment_mode is shared beside",
        ),
        (
            {"task.toml": _toml('environment_mode = "alone"', "verifier")},
            "`verifier.environment_mode` = 'alone'",
        ),
        (
            {"task.toml": _toml('collect = [{command = "x", service = "db"}]', "verifier")},
            "[[verifier.collect]] in the service 'db': not supported",
        ),
        (
            {"task.toml": 'artifacts = [{source = "/a", service = "db"}]\n'},
            "an artifact of the service 'db'",
        ),
        ({"task.toml": 'artifacts = ["/a/../b"]\n'}, "expected a path without `..`"),
        ({"instruction.md": None}, "no instruction.md"),
        ({"instruction.md": " \n"}, "instruction.md is empty"),
        ({"instruction.md": b"\xff"}, "instruction.md cannot be read"),
        (
            {"environment/Dockerfile": None},
            "no environment/Dockerfile and no environment.docker_image",
        ),
        ({"tests/test.sh": None, "tests/test_x.py": ""}, "no tests/test.sh"),
        (
            {"environment/docker-compose.yaml": SERVICES + "  db: {image: x}\n"},
            "starts db: not supported",
        ),
        ({"environment/docker-compose.yaml": "a: [\n"}, "docker-compose.yaml cannot be read"),
        ({"tests/docker-compose.yaml": "a: 1\n"}, "tests/docker-compose.yaml has no services"),
        ({"trajectory.json": "{}"}, "trajectory.json, a conversation to go on with: not supported"),
        ({"task.toml": f"{TOML}x = {'[' * 2000}{']' * 2000}\n"}, "task.toml is nested too deep"),
        ({"task.toml": TOML.encode("utf-16")}, "task.toml is not UTF-8; expected TOML in UTF-8"),
        ({"task.toml": TOML + "[agent]\n"}, "task.toml is not TOML: Cannot declare"),
        (
            {"task.toml": TOML.replace("120", "1e9")},
            "`agent.timeout_sec` = 1000000000.0; expected 86400.0",
        ),
        ({"task.toml": TOML.replace("512", "9" * 20)}, "expected 1073741824 or less"),
        ({"task.toml": _toml("build_timeout_sec = 2020-01-01")}, "expected a number"),
        ({"task.toml": _toml('artifacts = [""]', "")}, "artifact ''; expected a path"),
        ({"task.toml": _toml("artifacts = [3]", "")}, "`artifacts.0.str` = 3; expected text"),
        (
            {"task.toml": _toml('docker_image = " debian"')},
            "docker_image = ' debian'; expected REG",
        ),
        ({"task.toml": _toml('docker_image = "../etc"')}, "docker_image = '../etc'; expected REG"),
        ({"task.toml": _toml('workdir = "/a\\nb"')}, "workdir = '/a\\nb'; expected an absolute"),
        (
            {"task.toml": TOML + '[environment.env]\n"A B" = "x"\n'},
            "environment.env has 'A B' = 'x'",
        ),
        ({"task.toml": TOML + '[verifier.env]\n"A;rm" = "x"\n'}, "verifier.env has 'A;rm' = 'x'"),
        ({"task.toml": TOML + '[environment.env]\nA = "\\u0000"\n'}, "a text without NUL"),
        ({"task.toml": TOML + "[environment.env]\nA = 3\n"}, "`environment.env.A` = 3"),
        ({"task.toml": None, "task.toml/x": ""}, "task.toml cannot be read: Is a directory"),
        ({"instruction.md": None, "instruction.md/x": ""}, "instruction.md cannot be read"),
        ({"tests/test.sh": "#!/bin/bash\r\n"}, "tests/test.sh has Windows line ends; expected LF"),
        ({"solution/solve.sh": "#!/bin/bash\r\n"}, "solution/solve.sh has Windows line ends"),
        (
            {
                **STEPS,
                "task.toml": TOML + STEPS_TOML,
                "steps/two/tests/test.sh": "#!/bin/bash\r\n",
            },
            "tests/test.sh has Windows line ends",
        ),
        (
            {"environment/docker-compose.yaml": "services: !!python/object:os.system {}\n"},
            "docker-compose.yaml cannot be read: could not determine a constructor",
        ),
    ],
)
def test_a_broken_folder_is_refused_in_a_single_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    parts: dict[str, str | bytes | None],
    problem: str,
) -> None:
    folder = make_folder(tmp_path / "broken", **parts)
    with pytest.raises(TaskError) as caught:
        read_tasks(tmp_path)
    text = str(caught.value)
    assert dispatch(["check", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert text.startswith(f"{folder}: ")
    assert problem in text
    assert "\n" not in text
    make_folder(tmp_path / "a-good-one")
    loaded = read_tasks(tmp_path, skip_invalid=True)
    assert (len(loaded.tasks), len(loaded.bad)) == (1, 1)


def test_variables_of_the_host_are_handed_to_the_verifier_alone_where_the_operator_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host_variables.LIST, "API_KEY, OTHER")
    monkeypatch.setenv("API_KEY", "s3cret")
    text = TOML + '[verifier.env]\nKEY = "${API_KEY}"\nURL = "${HOME:-none}"\n'
    folder = make_folder(tmp_path / "a", **{"task.toml": text})
    (task,) = read_tasks(folder).tasks
    variables = task.data["verifier"]["environment"]
    assert variables == {"KEY": "${API_KEY}", "URL": "none"}, "no value is in a task"
    assert host_variables.filled(variables) == {"KEY": "s3cret", "URL": "none"}
    assert host_variables.masked("it is s3cret", variables) == "it is ***"
    make_folder(folder, **{"task.toml": TOML + '[environment.env]\nKEY = "${API_KEY}"\n'})
    with pytest.raises(TaskError, match=r"environment\.env\.KEY.*not handed to agents"):
        read_tasks(folder)
    monkeypatch.delenv(host_variables.LIST)
    with pytest.raises(LookupError, match="API_KEY is not in PRORL_TASK_VARIABLES"):
        host_variables.filled(variables)


def test_a_link_out_of_the_task_and_a_name_twice_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    (folder / "tests/inside").symlink_to("test.sh")
    read_tasks(tmp_path)
    (folder / "tests/data").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="tests/data links to /etc/passwd"):
        read_tasks(tmp_path)
    (folder / "tests/data").unlink()
    for target in ("data", "nothing"):
        (folder / "tests/data").symlink_to(target)
        with pytest.raises(TaskError, match=f"tests/data links to {target}; expected links that"):
            read_tasks(tmp_path)
        (folder / "tests/data").unlink()
    make_folder(tmp_path / "deeper" / "a")
    with pytest.raises(TaskError, match="task_id 'a' is also on"):
        read_tasks(tmp_path)


@pytest.mark.parametrize("name", ["two\nlines", os.fsdecode(b"no-utf8-\xff")])
def test_a_path_that_fits_into_no_task_is_refused_in_a_single_line(
    tmp_path: Path, name: str
) -> None:
    make_folder(tmp_path / name)
    with pytest.raises(TaskError, match="its path has a control character, or is not") as caught:
        read_tasks(tmp_path)
    assert str(caught.value).isprintable()


def test_marks_of_windows_editors_and_names_of_any_letters_are_read(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    parts = {
        "task.toml": mark + TOML.replace("\n", "\r\n").encode(),
        "instruction.md": mark + b"# canary\nDo it.",
    }
    make_folder(tmp_path / "a b", **parts)
    make_folder(tmp_path / "ünï")
    text = 'artifacts = ["out/x"]\n' + _toml('environment_mode = "separate"', "verifier")
    make_folder(tmp_path / "x", **{"task.toml": text})
    spaced, relative, unicode = read_tasks(tmp_path).tasks
    assert (spaced.task_id, spaced.prompt, unicode.task_id) == ("a b", "Do it.", "ünï")
    assert relative.data["artifacts"][1]["source"] == "/out/x", "as `docker cp` takes it"


def test_a_single_service_under_other_file_names_is_no_second_service(tmp_path: Path) -> None:
    parts = {
        "environment/docker-compose.yaml": SERVICES,
        "environment/docker-compose.yml": SERVICES + "  db: {image: x}\n",
    }
    make_folder(tmp_path / "a", **parts)
    assert len(read_tasks(tmp_path).tasks) == 1


def test_a_run_has_the_time_limits_of_its_tasks_unless_it_states_its_own(tmp_path: Path) -> None:
    make_folder(tmp_path / "short")
    long = TOML.replace("60.5", "900").replace("120", "1800")
    make_folder(tmp_path / "long", **{"task.toml": long})
    tasks = read_tasks(tmp_path).tasks
    limits = with_task_limits(RunConfig(run_id="r"), tasks).limits
    assert (limits.run_s, limits.eval_s, limits.init_s) == (1800, 960, Limits().init_s)
    own = RunConfig.model_validate({"run_id": "r", "limits": {"run_s": 7}})
    limits = with_task_limits(own, tasks).limits
    assert (limits.run_s, limits.eval_s) == (7, 960)
    assert with_task_limits(own, []) == own


def test_tasks_of_steps_and_of_terminal_bench_have_the_time_limits_of_their_parts(
    tmp_path: Path,
) -> None:
    """The tests of a step behind which another one follows run in the agent's time."""
    network = 'network_mode = "no-network"\n'  # which the task has, too
    toml = (
        f"{TOML}{STEPS_TOML}[steps.verifier]\ntimeout_sec = 9\n{network}"
        f"[steps.agent]\ntimeout_sec = 7\n{network}"
    )
    make_folder(tmp_path / "steps", **{**STEPS, "task.toml": toml})
    make_folder(tmp_path / "terminal", **TERMINAL_BENCH)
    steps, terminal = read_tasks(tmp_path).tasks
    assert (steps.env, steps.prompt) == ("harbor_steps", "Write 5 into sum.txt.")
    assert steps.data["agent_timeout_s"] == 120 + 60.5 + 7
    assert steps.data["verifier"]["timeout_s"] == 60.5 + 9
    assert (terminal.env, terminal.prompt) == ("harbor", "Write 5 into sum.txt.")
    assert terminal.data["image"] == f"dockerfile:{tmp_path / 'terminal'}"
    assert terminal.data["environment"] == {"TEST_DIR": "/tests", "SIDE": "agent"}
    assert terminal.data["agent_timeout_s"] == 360
    assert terminal.data["verifier"]["timeout_s"] == 30
