"""Task folders of terminal-bench 1, which Harbor's came from, as tasks of the env `harbor`.

    task.yaml             instruction, max_agent_timeout_sec, max_test_timeout_sec
    Dockerfile            of the image, with the whole folder as its context
    docker-compose.yaml   one service
    tests/, run-tests.sh  as /tests and its test.sh, of which pytest's summary is read
    solution.sh           the reference

Such a task has a network, as Harbor's have by default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl.config.validation import explain
from prorl.errors import TaskError
from prorl.network_policy import PUBLIC
from prorl.tasks.formats.harbor_folder import COMPOSE, check_links, read_services, unsupported
from prorl.types import DOCKERFILE, Json, Task

CONFIG = "task.yaml"
TEST_SCRIPT = "run-tests.sh"
BUILD_S = 600.0
"""Harbor's default, since these tasks state none."""
PARSERS = ("pytest",)


class TaskYaml(BaseModel):
    """The keys that have an effect; the others are the author's own."""

    model_config = ConfigDict(extra="ignore")

    instruction: str = Field(min_length=1)
    parser_name: str = "pytest"
    max_agent_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 360.0
    max_test_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


def is_terminal_bench(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "task.toml").is_file()


def read_terminal_bench(folder: Path) -> Task:
    """The task of a folder with a task.yaml. Raises TaskError."""
    config = _config(folder)
    if config.parser_name not in PARSERS:
        raise unsupported(f"{CONFIG}: parser_name = {config.parser_name!r}", ", ".join(PARSERS))
    for name in ("Dockerfile", TEST_SCRIPT):
        if not (folder / name).is_file():
            raise TaskError(f"no {name}", f"{name} beside {CONFIG}")
    check_links(folder, folder)
    tests = [["tests", "."]] if (folder / "tests").is_dir() else []
    has_solution = (folder / "solution.sh").is_file()
    return Task(
        task_id=folder.name,
        env="harbor",
        prompt=config.instruction.strip("\n"),
        data_source=folder.parent.name,
        data={
            "folder": str(folder),
            "image": f"{DOCKERFILE}{folder}",
            "build_timeout_s": BUILD_S,
            "environment": {"TEST_DIR": "/tests", **_variables(folder)},
            "sandbox": {},
            "network": PUBLIC,
            "agent_timeout_s": config.max_agent_timeout_sec,
            "verifier": {
                "image": "",
                "tests": [*tests, [TEST_SCRIPT, "test.sh"]],
                "reads_summary": True,
                "timeout_s": config.max_test_timeout_sec,
                "environment": {},
                "sandbox": {},
            },
            "solution": [["solution.sh", "solve.sh"]] if has_solution else [],
            "deviations": [],
        },
    )


def _config(folder: Path) -> TaskYaml:
    import yaml  # here: the client alone, which reads other formats, has no YAML

    try:
        values = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"{CONFIG} cannot be read: {reason}", "a file in YAML") from None
    if not isinstance(values, dict):
        raise TaskError(f"{CONFIG} holds {str(values)[:60]!r}", "keys and values")
    try:
        return TaskYaml.model_validate(values)
    except ValidationError as error:
        problem = explain(error, TaskYaml, CONFIG)
        raise TaskError(problem.problem, problem.expected) from None


def _variables(folder: Path) -> dict[str, str]:
    """Returns the variables of the one service of docker-compose.yaml, without what terminal-bench
    fills in. Raises TaskError for what another build, or more than one service, would need.
    """
    if not (folder / COMPOSE).is_file():
        return {}
    services = read_services(folder / COMPOSE)
    if len(services) != 1:
        starts = f"{COMPOSE} starts {', '.join(sorted(map(str, services)))}"
        raise unsupported(starts, "one service")
    (service,) = services.values()
    build: Json = (service or {}).get("build") or {}
    build = {"context": build} if isinstance(build, str) else build
    names = {"context": ".", "dockerfile": "Dockerfile"}
    for key, expected in names.items():
        if os.path.normpath(str(build.get(key, expected))) != expected:
            raise unsupported(f"{COMPOSE}: build.{key} = {build[key]!r}", repr(expected))
    variables = (service or {}).get("environment") or {}
    if isinstance(variables, list):
        variables = dict(str(pair).partition("=")[::2] for pair in variables)
    texts = {str(name): str(text) for name, text in variables.items()}
    return {name: text for name, text in texts.items() if "${" not in text}
