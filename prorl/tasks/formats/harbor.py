"""One Harbor task folder -> one `Task`, or a TaskError of one line.

A folder is read where it lies, and the task names it by its absolute path: each node that prepares
or grades the task needs it there. `harbor_toml.py` has the keys of `task.toml`, docs/harbor.md what
is read, refused and reported.

A task that could not be graded as its author meant is refused here, before anything is started. A
key that has no effect is kept in `data.deviations`, which `TaskSet.deviations` counts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from prorl.config.validation import explain
from prorl.errors import TaskError
from prorl.tasks.formats import Format, Row
from prorl.tasks.formats.harbor_folder import (
    COMPOSE,
    CONFIG,
    check_links,
    check_path,
    check_script,
    check_services,
    check_tests,
    read_instruction,
    read_variables,
    stated_network,
    unsupported,
)
from prorl.tasks.formats.harbor_steps import with_steps
from prorl.tasks.formats.harbor_toml import (
    Artifact,
    Environment,
    HarborPhase,
    TaskToml,
    unknown_keys,
)
from prorl.tasks.formats.terminal_bench import is_terminal_bench, read_terminal_bench
from prorl.types import DOCKER, DOCKERFILE, Json, Task

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MIB = 1 << 20
ARTIFACTS = "/logs/artifacts"
"""Harbor collects this folder of the agent's environment in every task."""

_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SECTIONS = ("task", "metadata", "verifier", "agent", "environment", "solution")


def read_folder(row: Row, index: int) -> Task:
    """The task of a row `{"harbor_folder": PATH}`. Raises TaskError."""
    folder = Path(row["harbor_folder"]).absolute()
    check_path(folder)
    if is_terminal_bench(folder):
        return read_terminal_bench(folder)
    config = _config(folder)
    _check_supported(folder, config)
    environment, verifier = config.environment, config.verifier
    verifier_image, tests = _verifier_image(folder, config)
    if tests and not config.steps:
        check_tests(folder / "tests")
    for name in ("environment", "tests", "solution", "steps"):
        check_links(folder, folder / name)
    check_script(folder / "solution" / "solve.sh")
    task = Task(
        task_id=config.task.name if config.task else folder.name,
        env="harbor",
        prompt="" if config.steps else read_instruction(folder),
        data_source=folder.parent.name,
        data={
            "folder": str(folder),
            "image": _image(folder, environment),
            "workdir_files": _workdir_files(folder, environment),
            "build_timeout_s": environment.build_timeout_sec,
            "workdir": environment.workdir or "",
            "environment": read_variables("environment.env", environment.env),
            "healthcheck": environment.healthcheck and environment.healthcheck.model_dump(),
            "sandbox": _resources(environment),
            "network": _network(config),
            "agent_timeout_s": config.agent.timeout_sec,
            "verifier": {
                "image": verifier_image,
                "tests": tests,
                "timeout_s": verifier.timeout_sec,
                "environment": read_variables("verifier.env", verifier.env, is_hosts=True),
                "workdir": (verifier.environment and verifier.environment.workdir) or "",
                "sandbox": _resources(verifier.environment or environment),
                "variables": read_variables(
                    "verifier.environment.env",
                    verifier.environment.env if verifier.environment else environment.env,
                ),
            },
            "artifacts": _artifacts(config),
            "collect": [
                {"command": hook.command, "timeout_s": hook.timeout_sec}
                for hook in verifier.collect
            ],
            "solution": [["solution", "."]] if (folder / "solution/solve.sh").is_file() else [],
            "solution_environment": read_variables(
                "solution.env", config.solution.env, is_hosts=True
            ),
            "deviations": list(_deviations(folder, config)),
        },
    )
    return with_steps(task, folder, config) if config.steps else task


# ---- task.toml


def _config(folder: Path) -> TaskToml:
    path = folder / CONFIG
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise TaskError(f"no {CONFIG}", f"{CONFIG} beside instruction.md") from None
    except OSError as error:
        raise TaskError(f"{CONFIG} cannot be read: {error.strerror}", "a readable file") from error
    except UnicodeDecodeError:
        raise TaskError(f"{CONFIG} is not UTF-8", "TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{CONFIG} is not TOML: {error}", "a TOML file") from None
    except RecursionError:
        raise TaskError(f"{CONFIG} is nested too deep", "a TOML file") from None
    for name in _SECTIONS:
        if name in values and not isinstance(values[name], dict):
            raise TaskError(f"{CONFIG}: `{name}` = {str(values[name])[:60]!r}", f"a table [{name}]")
    try:
        config = TaskToml.model_validate(values)
    except ValidationError as error:
        problem = explain(error, TaskToml, CONFIG)
        raise TaskError(problem.problem, problem.expected) from None
    if config.schema_version not in VERSIONS:
        raise TaskError(
            f"{CONFIG}: schema_version = {config.schema_version!r}", f"one of {', '.join(VERSIONS)}"
        )
    if config.task and not _PACKAGE.fullmatch(config.task.name):
        raise TaskError(f"{CONFIG}: task.name = {config.task.name!r}", "ORGANISATION/NAME")
    return config


def _check_supported(folder: Path, config: TaskToml) -> None:
    """Raise TaskError for what would need another verifier or another machine than we have."""
    environment, verifier = config.environment, config.verifier
    if (folder / "trajectory.json").exists():
        raise unsupported("trajectory.json, a conversation to go on with", "a task without it")
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        raise TaskError(
            f"{CONFIG}: verifier.environment_mode is shared beside [verifier.environment]",
            'environment_mode = "separate", or no environment of its own',
        )
    for hook in verifier.collect:
        if hook.service != "main":
            raise unsupported(f"[[verifier.collect]] in the service {hook.service!r}", "main")
    for place, each in (
        ("environment", environment),
        ("verifier.environment", verifier.environment),
    ):
        if each is None:
            continue
        if each.os.lower() != "linux":
            raise unsupported(f"{place}.os = {each.os!r}", "linux")
        if each.gpus or each.tpu:
            raise unsupported(f"a GPU or TPU in [{place}]", "gpus = 0")
        if each.mcp_servers:
            raise unsupported(f"{place}.mcp_servers", "mcp_servers = []")
        if each.workdir and not (each.workdir.startswith("/") and each.workdir.isprintable()):
            raise TaskError(f"{CONFIG}: {place}.workdir = {each.workdir!r}", "an absolute path")
    for name in ("environment", "tests"):
        check_services(folder / name / COMPOSE)


# ---- parts of a task


def _image(folder: Path, environment: Environment) -> str:
    """The agent's image; `docker_image` counts where it is named, as in Harbor."""
    if environment.docker_image:
        return _named_image(environment.docker_image)
    if not (folder / "environment" / "Dockerfile").is_file():
        raise TaskError(
            "no environment/Dockerfile and no environment.docker_image", "one of the two"
        )
    return f"{DOCKERFILE}{folder / 'environment'}"


def _named_image(name: str) -> str:
    if re.search(r"\s|^[^\w/]", name):
        raise TaskError(
            f"{CONFIG}: docker_image = {name!r}", "REGISTRY/NAME:TAG, or the path of a .sif"
        )
    return name if name.startswith("/") else f"{DOCKER}{name.removeprefix(DOCKER)}"


def _workdir_files(folder: Path, environment: Environment) -> list[list[str]]:
    """Returns the files for the first folder of an image that is named: Harbor copies
    `environment/` there where it has nothing to build.
    """
    own = folder / "environment"
    is_built = any((own / name).exists() for name in ("Dockerfile", COMPOSE))
    has_files = bool(environment.docker_image) and own.is_dir() and any(own.iterdir())
    return [["environment", "."]] if has_files and not is_built else []


def _verifier_image(folder: Path, config: TaskToml) -> tuple[str, list[list[str]]]:
    """The verifier's own image, empty where it is the agent's, and the tests to put into it."""
    tests = [["tests", "."]]
    if not config.verifier.is_separate:
        return "", tests
    own = config.verifier.environment
    if own is not None and own.docker_image:
        return _named_image(own.docker_image), []
    if (folder / "tests" / "Dockerfile").is_file():
        return f"{DOCKERFILE}{folder / 'tests'}", []
    return _image(folder, config.environment), tests


def _resources(environment: Environment) -> dict[str, Json]:
    """Returns the limits that the task sets for a sandbox, as `data.sandbox` has it."""
    limits = {
        "memory_bytes": environment.memory_mb and environment.memory_mb * MIB,
        "overlay_bytes": environment.storage_mb and environment.storage_mb * MIB,
        "cpus": environment.cpus and float(environment.cpus),
    }
    return {name: value for name, value in limits.items() if value}


def _network(config: TaskToml) -> dict[str, Json]:
    """Returns the network that each phase may reach, as `data.network` has it: its own, else its
    environment's. Raises TaskError.
    """
    own = config.verifier.environment if config.verifier.is_separate else None
    places: dict[str, Environment | HarborPhase] = {
        "environment": config.environment,
        "verifier.environment": own or config.environment,
        "agent": config.agent,
        "verifier": config.verifier,
    }
    stated = {place: stated_network(place, keys) for place, keys in places.items()}
    return {
        "agent": stated["agent"] or stated["environment"],
        "verifier": stated["verifier"] or stated["verifier.environment"],
    }


def _artifacts(config: TaskToml) -> list[dict[str, Json]]:
    """Returns what a separate verifier sees of the agent's environment, at the same paths."""
    declared = [Artifact(source=ARTIFACTS)]
    for each in config.artifacts:
        artifact = Artifact(source=each) if isinstance(each, str) else each
        source = PurePosixPath("/", artifact.source)  # as `docker cp` takes a relative one
        if artifact.service not in (None, "main"):
            raise unsupported(f"an artifact of the service {artifact.service!r}", "main")
        if ".." in source.parts or not artifact.source:
            raise TaskError(f"{CONFIG}: artifact {artifact.source!r}", "a path without `..`")
        declared.append(artifact.model_copy(update={"source": str(source)}))
    return [{"source": each.source, "exclude": each.exclude} for each in declared]


def _deviations(folder: Path, config: TaskToml) -> Iterator[str]:
    """Yields what the task says that has no effect here, or another one than in Harbor."""
    for key in unknown_keys(config):
        yield f"the key `{key}` of {CONFIG} is unknown and has no effect"
    users = [("agent", config.agent.user), ("verifier", config.verifier.user)]
    users += [("verifier.collect", hook.user) for hook in config.verifier.collect]
    for step in config.steps or ():
        users += [("steps.agent", step.agent.user), ("steps.verifier", step.verifier.user)]
    for place, user in users:
        if user not in (None, "root", 0, "0"):
            yield f"{place}.user: a sandbox has one user, which owns every file of the image"
    kept = [config.artifacts, *(step.artifacts for step in config.steps or ())]
    if any(kept) and not config.verifier.is_separate:
        yield "artifacts: a shared verifier sees every file, and none is kept apart"
    if config.environment.skills_dir:
        yield "environment.skills_dir: the native agent reads no skills"
    if any((folder / name / ".harborignore").is_file() for name in ("tests", "solution")):
        yield ".harborignore: its rules are not applied, and all files are copied"


HARBOR = Format("harbor", ("harbor_folder",), read_folder)
