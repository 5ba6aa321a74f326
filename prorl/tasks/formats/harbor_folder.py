"""Helpers that the readers of task folders share: files that are checked, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from prorl.config import host_variables
from prorl.errors import TaskError
from prorl.network_policy import NO_NETWORK, read_network
from prorl.tasks.formats.harbor_toml import Environment, HarborPhase
from prorl.types import Json

CONFIG = "task.toml"
COMPOSE = "docker-compose.yaml"
"""The only name by which Harbor reads services; `docker-compose.yml` is a file like any other."""


_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_NO_PATH = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def check_path(folder: Path) -> None:
    """Raise TaskError for a folder whose path fits into no task: its JSON is UTF-8, and a line of
    a message is one line.
    """
    if _NO_PATH.search(str(folder)):
        raise TaskError(
            "its path has a control character, or is not UTF-8", "a path of plain text", "rename it"
        )


def unsupported(feature: str, expected: str) -> TaskError:
    return TaskError(
        f"{feature}: not supported", expected, "leave the task out with --skip-invalid"
    )


def check_services(path: Path, main: str = "main") -> None:
    """Raise TaskError where a compose file starts another service than `main`."""
    if path.is_file():
        services = read_services(path)
        if others := sorted(set(services) - {main}):
            starts = f"{path.parent.name}/{path.name} starts {', '.join(map(str, others))}"
            raise unsupported(starts, f"the service {main} alone")


def read_services(path: Path) -> dict[str, Json]:
    """The services of a compose file by their names. Raises TaskError."""
    import yaml  # here: the client alone, which reads other formats, has no YAML

    where = f"{path.parent.name}/{path.name}"
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"{where} cannot be read: {reason}", "a compose file in YAML") from None
    services = values.get("services") if isinstance(values, dict) else None
    if not isinstance(services, dict):
        raise TaskError(f"{where} has no services", "`services:` by their names")
    return services


def read_instruction(folder: Path, name: str = "instruction.md") -> str:
    """Returns what the agent is asked. Leading comments that carry a canary are the author's mark
    for crawlers, and Harbor leaves them out, too.
    """
    try:
        lines = (folder / name).read_text("utf-8-sig").split("\n")
    except FileNotFoundError:
        raise TaskError(f"no {name}", f"{name} with the agent's task") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{name} cannot be read: {error}", "a text in UTF-8") from None
    while lines and _is_canary(lines[0].strip().lower()):
        lines.pop(0)
    text = "\n".join(lines).strip("\n")
    if not text.strip():
        raise TaskError(f"{name} is empty", "the agent's task")
    return text


def _is_canary(line: str) -> bool:
    """Returns whether a line of lower case is a comment that speaks of a canary."""
    is_comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return is_comment and "canary" in line


def stated_network(place: str, keys: Environment | HarborPhase) -> dict[str, Json] | None:
    """Returns the network that `network_mode` and `allowed_hosts` state in a table; None for a
    phase that states nothing. Raises TaskError.
    """
    mode = keys.network if isinstance(keys, Environment) else keys.network_mode
    if mode is None and keys.allowed_hosts is None:
        return None
    hosts = {} if keys.allowed_hosts is None else {"allowed_hosts": keys.allowed_hosts}
    stated: dict[str, Json] = {"network_mode": mode or NO_NETWORK, **hosts}
    read_network(stated, f"{CONFIG}: {place}")
    return stated


def check_links(task: Path, folder: Path) -> None:
    """Raise TaskError for a symbolic link that leads out of the task."""
    root = task.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not _leads_into(path, root):
                raise TaskError(
                    f"{path.relative_to(task)} links to {os.readlink(path)}",
                    "links that stay inside the task folder, and end",
                )


def _leads_into(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # an end that is not there, or a circle
        return False


def check_tests(folder: Path) -> None:
    """Raise TaskError where a folder of tests has no script that can run."""
    if not (folder / "test.sh").is_file():
        raise TaskError("no tests/test.sh", "the script that writes the reward")
    check_script(folder / "test.sh")


def check_script(path: Path) -> None:
    """Raise TaskError for a script whose interpreter the kernel does not find, since its name ends
    with a carriage return; Harbor runs none, too.
    """
    if path.is_file():
        with open(path, "rb") as file:
            if file.readline(4096).endswith(b"\r\n"):
                name = f"{path.parent.name}/{path.name}"
                raise TaskError(f"{name} has Windows line ends", "LF", f"sed -i 's/\\r$//' {name}")


def read_variables(
    place: str, variables: Mapping[str, str], *, is_hosts: bool = False
) -> dict[str, str]:
    """Variables with their defaults filled in. With `is_hosts`, those that the operator lists stay
    as they are written, and are filled in where they are used. Raises TaskError for another that
    only the host has.

    >>> read_variables("verifier.env", {"A": "x", "B": "${LEVEL:-3}"})
    {'A': 'x', 'B': '3'}
    """
    values = {}
    for name, text in variables.items():
        if not _VARIABLE.fullmatch(name) or "\0" in text:
            raise TaskError(
                f"{CONFIG}: {place} has {name!r} = {text[:60]!r}",
                "a name of letters, digits and _, and a text without NUL",
            )
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
