"""One Harbor task folder -> one `Task`, or a TaskError of one line.

A folder is read where it lies, and the task names it by its absolute path: each node that prepares
or grades the task needs it there. `harbor_toml.py` has the keys of `task.toml`, docs/harbor.md what
is read, refused and reported.

A task that could not be judged as its author meant is refused here, before anything is started. A
key that has no effect is kept in `data.deviations`, which `TaskSet.deviations` counts.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from prorl.config import host_variables
from prorl.config.validation import explain
from prorl.errors import TaskError
from prorl.network_policy import NO_NETWORK, read_network
from prorl.tasks.formats import Format, Row
from prorl.tasks.formats.harbor_toml import (
    Artifact,
    Environment,
    HarborPhase,
    TaskToml,
    unknown_keys,
)
from prorl.types import DOCKER, DOCKERFILE, Json, Task

CONFIG = "task.toml"
VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MIB = 1 << 20
COMPOSE = "docker-compose.yaml"
"""The only name by which Harbor reads services; `docker-compose.yml` is a file like any other."""
ARTIFACTS = "/logs/artifacts"
"""Harbor collects this folder of the agent's environment in every task."""

_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SECTIONS = ("task", "metadata", "verifier", "agent", "environment", "solution")


def read_folder(row: Row, index: int) -> Task:
    """The task of a row `{"harbor_folder": PATH}`. Raises TaskError."""
    folder = Path(row["harbor_folder"]).absolute()
    config = _config(folder)
    _check_supported(folder, config)
    environment, verifier = config.environment, config.verifier
    verifier_image, has_tests = _verifier_image(folder, config)
    _check_tests(folder, has_tests)
    for name in ("environment", "tests", "solution"):
        _check_links(folder, folder / name)
    return Task(
        task_id=config.task.name if config.task else folder.name,
        env="harbor",
        prompt=_instruction(folder),
        data_source=folder.parent.name,
        data={
            "folder": str(folder),
            "image": _image(folder, environment),
            "build_timeout_s": environment.build_timeout_sec,
            "workdir": environment.workdir or "",
            "environment": _variables("environment.env", environment.env),
            "healthcheck": environment.healthcheck and environment.healthcheck.model_dump(),
            "sandbox": _resources(environment),
            "network": _network(config),
            "agent_timeout_s": config.agent.timeout_sec,
            "verifier": {
                "image": verifier_image,
                "has_tests": has_tests,
                "timeout_s": verifier.timeout_sec,
                "environment": _variables("verifier.env", verifier.env, is_hosts=True),
                "workdir": (verifier.environment and verifier.environment.workdir) or "",
                "sandbox": _resources(verifier.environment or environment),
                "variables": _variables(
                    "verifier.environment.env",
                    verifier.environment.env if verifier.environment else environment.env,
                ),
            },
            "artifacts": _artifacts(config),
            "collect": [
                {"command": hook.command, "timeout_s": hook.timeout_sec}
                for hook in verifier.collect
            ],
            "solution_environment": _variables("solution.env", config.solution.env, is_hosts=True),
            "deviations": list(_deviations(folder, config)),
        },
    )


# ---- task.toml


def _config(folder: Path) -> TaskToml:
    path = folder / CONFIG
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise TaskError(f"no {CONFIG}", f"{CONFIG} beside instruction.md") from None
    except OSError as error:
        raise TaskError(f"{CONFIG} cannot be read: {error.strerror}", "a readable file") from error
    except UnicodeDecodeError:
        raise TaskError(f"{CONFIG} is not UTF-8", "TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{CONFIG} is not TOML: {error}", "a TOML file") from None
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
    """Raise TaskError for what would need another judge or another machine than we have."""
    environment, verifier = config.environment, config.verifier
    if config.steps:
        raise _unsupported("[[steps]]", "a task of one step")
    if (folder / "trajectory.json").exists():
        raise _unsupported("trajectory.json, a conversation to go on with", "a task without it")
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        raise TaskError(
            f"{CONFIG}: verifier.environment_mode is shared beside [verifier.environment]",
            'environment_mode = "separate", or no environment of its own',
        )
    for hook in verifier.collect:
        if hook.service != "main":
            raise _unsupported(f"[[verifier.collect]] in the service {hook.service!r}", "main")
    for place, each in (
        ("environment", environment),
        ("verifier.environment", verifier.environment),
    ):
        if each is None:
            continue
        if each.os.lower() != "linux":
            raise _unsupported(f"{place}.os = {each.os!r}", "linux")
        if each.gpus or each.tpu:
            raise _unsupported(f"a GPU or TPU in [{place}]", "gpus = 0")
        if each.mcp_servers:
            raise _unsupported(f"{place}.mcp_servers", "mcp_servers = []")
        if each.workdir and not each.workdir.startswith("/"):
            raise TaskError(f"{CONFIG}: {place}.workdir = {each.workdir!r}", "an absolute path")
    for name in ("environment", "tests"):
        _check_services(folder / name / COMPOSE)


def _unsupported(what: str, expected: str) -> TaskError:
    return TaskError(f"{what}: not supported", expected, "leave the task out with --skip-invalid")


def _check_services(path: Path) -> None:
    """Raise TaskError where a compose file starts another service than `main`."""
    if not path.is_file():
        return
    import yaml  # here: the client alone, which reads other formats, has no YAML

    where = f"{path.parent.name}/{COMPOSE}"
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"{where} cannot be read: {reason}", "a compose file in YAML") from None
    services = values.get("services") if isinstance(values, dict) else None
    if not isinstance(services, dict):
        raise TaskError(f"{where} has no services", "`services:` with `main`")
    if others := sorted(set(services) - {"main"}):
        raise _unsupported(
            f"{where} starts {', '.join(map(str, others))}", "the service main alone"
        )


# ---- parts of a task


def _instruction(folder: Path) -> str:
    """Returns what the agent is asked. Leading comments that carry a canary are the author's mark
    for crawlers, and Harbor leaves them out, too.
    """
    try:
        lines = (folder / "instruction.md").read_text().split("\n")
    except FileNotFoundError:
        raise TaskError("no instruction.md", "instruction.md with the agent's task") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"instruction.md cannot be read: {error}", "a text in UTF-8") from None
    while lines and _is_canary(lines[0].strip().lower()):
        lines.pop(0)
    text = "\n".join(lines).strip("\n")
    if not text.strip():
        raise TaskError("instruction.md is empty", "the agent's task")
    return text


def _is_canary(line: str) -> bool:
    """Returns whether a line of lower case is a comment that speaks of a canary."""
    is_comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return is_comment and "canary" in line


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
    return name if name.startswith("/") else f"{DOCKER}{name.removeprefix(DOCKER)}"


def _verifier_image(folder: Path, config: TaskToml) -> tuple[str, bool]:
    """The verifier's own image, empty where it is the agent's, and whether that holds the tests."""
    if not config.verifier.is_separate:
        return "", False
    own = config.verifier.environment
    if own is not None and own.docker_image:
        return _named_image(own.docker_image), True
    if (folder / "tests" / "Dockerfile").is_file():
        return f"{DOCKERFILE}{folder / 'tests'}", True
    return _image(folder, config.environment), False


def _check_tests(folder: Path, in_image: bool) -> None:
    if not in_image and not (folder / "tests" / "test.sh").is_file():
        raise TaskError("no tests/test.sh", "the script that writes the reward")


def _resources(environment: Environment) -> dict[str, Json]:
    """Returns the limits that the task sets for a sandbox, as `data.sandbox` has it."""
    limits = {
        "memory_bytes": environment.memory_mb and environment.memory_mb * MIB,
        "overlay_bytes": environment.storage_mb and environment.storage_mb * MIB,
        "cpus": environment.cpus and float(environment.cpus),
    }
    return {name: value for name, value in limits.items() if value}


def _network(config: TaskToml) -> dict[str, Json]:
    """What each phase may reach, as `data.network` has it: its own, else its environment's. Raises
    TaskError.
    """
    own = config.verifier.environment if config.verifier.is_separate else None
    places: dict[str, Environment | HarborPhase] = {
        "environment": config.environment,
        "verifier.environment": own or config.environment,
        "agent": config.agent,
        "verifier": config.verifier,
    }
    stated = {place: _stated_network(place, keys) for place, keys in places.items()}
    return {
        "agent": stated["agent"] or stated["environment"],
        "verifier": stated["verifier"] or stated["verifier.environment"],
    }


def _stated_network(place: str, keys: Environment | HarborPhase) -> dict[str, Json] | None:
    """What `network_mode` and `allowed_hosts` say in a table; None for a phase that says nothing.
    Raises TaskError.
    """
    mode = keys.network if isinstance(keys, Environment) else keys.network_mode
    if mode is None and keys.allowed_hosts is None:
        return None
    hosts = {} if keys.allowed_hosts is None else {"allowed_hosts": keys.allowed_hosts}
    stated: dict[str, Json] = {"network_mode": mode or NO_NETWORK, **hosts}
    read_network(stated, f"{CONFIG}: {place}")
    return stated


def _variables(
    place: str, variables: Mapping[str, str], *, is_hosts: bool = False
) -> dict[str, str]:
    """Variables with their defaults filled in. With `is_hosts`, those that the operator lists stay
    as they are written, and are filled in where they are used. Raises TaskError for another that
    only the host has.

    >>> _variables("verifier.env", {"A": "x", "B": "${LEVEL:-3}"})
    {'A': 'x', 'B': '3'}
    """
    values = {}
    for name, text in variables.items():
        match = host_variables.TEMPLATE.fullmatch(text)
        values[name] = match[2] if match else text
        if match and is_hosts and match[1] in host_variables.listed():
            values[name] = text
        elif match and match[2] is None:
            raise TaskError(
                f"{CONFIG}: {place}.{name} = {text!r} needs the host's variable {match[1]}",
                "a value, or ${NAME:-DEFAULT}",
                f"export {host_variables.LIST}={match[1]} hands it to the verifier"
                if is_hosts
                else "variables of the host are not handed to agents",
            )
    return values


def _artifacts(config: TaskToml) -> list[dict[str, Json]]:
    """Returns what a separate verifier sees of the agent's environment, at the same paths."""
    declared = [Artifact(source=ARTIFACTS)]
    for each in config.artifacts:
        artifact = Artifact(source=each) if isinstance(each, str) else each
        if artifact.service not in (None, "main"):
            raise _unsupported(f"an artifact of the service {artifact.service!r}", "main")
        if ".." in PurePosixPath(artifact.source).parts:
            raise TaskError(f"{CONFIG}: artifact {artifact.source!r}", "a path without `..`")
        declared.append(artifact)
    return [{"source": each.source, "exclude": each.exclude} for each in declared]


def _check_links(task: Path, folder: Path) -> None:
    """Raise TaskError for a symbolic link that leads out of the task."""
    root = task.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise TaskError(
                    f"{path.relative_to(task)} links to {os.readlink(path)}",
                    "links that stay inside the task folder",
                )


def _deviations(folder: Path, config: TaskToml) -> Iterator[str]:
    """Yields what the task says that has no effect here, or another one than in Harbor."""
    for key in unknown_keys(config):
        yield f"the key `{key}` of {CONFIG} is unknown and has no effect"
    users = [("agent", config.agent.user), ("verifier", config.verifier.user)]
    users += [("verifier.collect", hook.user) for hook in config.verifier.collect]
    for place, user in users:
        if user not in (None, "root", 0, "0"):
            yield f"{place}.user: a sandbox has one user, which owns every file of the image"
    if config.environment.skills_dir:
        yield "environment.skills_dir: the native agent reads no skills"
    if any((folder / name / ".harborignore").is_file() for name in ("tests", "solution")):
        yield ".harborignore: its rules are not applied, and all files are copied"


HARBOR = Format("harbor", ("harbor_folder",), read_folder)
