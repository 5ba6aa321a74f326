"""What is looked at before a job may start: its tasks, its model server, its filter, its name."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prorl.backends.catalogue import is_server
from prorl.cli.settings import Job
from prorl.config import RunConfig, ServiceConfig
from prorl.envs import get_env
from prorl.errors import ConfigError
from prorl.filters import FILTERS
from prorl.tasks import TaskSet, read_tasks
from prorl.tasks.generated import is_generated
from prorl.types import Task

if TYPE_CHECKING:
    pass


def load(job: Job) -> list[TaskSet]:
    """The tasks of a file, a folder or generated sets (with commas), each checked by its env.

    Raises TaskError.
    """
    specs = job.tasks.split(",")
    if not all(map(is_generated, specs)):
        specs = [job.tasks]
    find_env = cache(get_env)

    def check(task: Task) -> None:
        find_env(task.env).check(task)

    return [
        read_tasks(spec, job.env, job.limit, skip_bad=job.skip_bad, check=check) for spec in specs
    ]


def check_model(job: Job, service: ServiceConfig, run: RunConfig) -> None:
    """Refuse a model server whose model is not known: its vocabulary is never guessed.

    Raises ConfigError.
    """
    if not any(map(is_server, service.backends)) or "tokenizer" in job.service:
        return
    if service.tokenizer == "bytes" and not (run.renderer.model or run.renderer.name):
        raise ConfigError(
            f"--policy {job.policy} without its model's directory",
            "tokenizer.json and chat template of the model that it serves",
            "add --set run.renderer.model=DIR",
        )


def check_backend(backends: Iterable[str]) -> None:
    """Refuse a model server that does not listen. Raises ConfigError."""
    for url in filter(is_server, backends):
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), 5).close()
        except (OSError, ValueError) as error:
            hint = "start it, or use a scripted policy such as oracle"
            raise ConfigError(
                f"no model server answers at {url} ({error})", "http://HOST:PORT of vLLM", hint
            ) from None


def free_name(root: Path, job: Job) -> str:
    """The first of `<tasks>-<policy>-1`, `-2` ... that no run of the root has."""
    policy = "model" if "/" in job.policy else re.split(r"[:?]", job.policy)[0]
    stem = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", re.split(r"[.:?]", Path(job.tasks).name)[0])
        .strip("-._")
        .lower()
        or "tasks"
    )
    number = 1
    while (root / f"{stem}-{policy}-{number}").exists():
        number += 1
    return f"{stem}-{policy}-{number}"


def filter_text(value: str) -> str:
    """A filter's name, SQL itself, or the content of a file of SQL. Raises ConfigError."""
    if value in FILTERS or " " in value.strip():
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"filter {value!r}: {reason}", f"{', '.join(FILTERS)}, or a readable file of SQL"
        ) from None
