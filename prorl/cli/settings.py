"""Settings of a job or a service: default < file < environment `PRORL_*` < flag.

Every key is checked, a mistake is one line. A config file (YAML or JSON) has the keys of `Job`: its
own, and the sections `service` and `run` with the keys of `ServiceConfig` and `RunConfig`. The same
keys are set by `--set service.init.slots=8`, and those of the service by `PRORL_INIT__SLOTS=8`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field

from prorl import env_settings, plugins
from prorl.backends.catalogue import (
    CATALOGUE,
    checkpoint,
    embedded,
    examples,
    has_scheme,
    is_server,
    scheme_of,
    valid_url,
)
from prorl.backends.embedded import TOY
from prorl.cli.options import Flag
from prorl.cli.usage import nearest
from prorl.config import (
    RESERVED_NAMES,
    RunConfig,
    SandboxConfig,
    ServiceConfig,
    environment,
    parse,
)
from prorl.config.file import load_file
from prorl.errors import ConfigError
from prorl.sandbox import kinds
from prorl.types import Json

POLICIES = {
    policy: f"{name}:{policy}" for name, scheme in CATALOGUE.items() for policy in scheme.policies
}
"""Policies with a name of their own -> backend; else `toy`, a checkpoint's directory, or the URL of
a backend.
"""


TAKES = (
    f"{', '.join(POLICIES)}, toy, a checkpoint's directory, or http://HOST:PORT of a model server"
)
"""The values that `--policy` takes, in words."""

_SCRIPTS = ", ".join(
    f"{policy} ({meaning})"
    for scheme in CATALOGUE.values()
    for policy, meaning in scheme.policies.items()
)

FAULTS = "error=0.1&nan=0.05&delay_s=0.02"
"""The faults of `--policy faulty` when it names none of its own."""


class Job(BaseModel):
    """One task file run as one run: the options of `prorl run` and `eval`, the keys of their files.

    It is written to RUN/job.json too, so that the run can be resumed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    tasks: str = Field(
        default="",
        description=(
            "file or folder of tasks in a published format: JSON Lines, JSON, Parquet"
            " (docs/tasks.md); or generated tasks, `arith:train?n=100,shop:train`"
        ),
    )
    policy: str = Field(
        default="oracle",
        description=(
            "http://HOST:PORT of a model server, a checkpoint's directory, toy (the demo's), or a"
            f" script that needs no model: {_SCRIPTS}"
        ),
    )
    n: Annotated[int | None, Parameter(name=["--n", "-n"])] = Field(
        default=None,
        ge=1,
        le=1024,
        description="rollouts of each task; default: 4 with flaky, else 1",
    )
    limit: int | None = Field(
        default=None, ge=1, description="how many tasks are taken from the file; default: all"
    )
    greedy: Flag = Field(default=False, description="add one rollout of each task at temperature 0")
    env: Annotated[Json, Parameter(accepts_keys=False)] = Field(
        default="auto",
        description=(
            "env of every task; auto = by the file's format. Settings of the env may"
            " follow: 'math?tools=none&system=@prompt.txt', where @FILE is the file's text;"
            " or name a YAML file: {name: math, tools: []} (docs/tasks.md)"
        ),
    )
    skip_invalid: Flag = Field(
        default=False,
        description="leave out rows that cannot be read or used, or whose prompt is too long",
    )
    name: str = Field(
        default="", description="name of the run; default: made from task file and policy"
    )
    service: Annotated[dict[str, Json], Parameter(parse=False)] = Field(
        default_factory=dict, description="keys of ServiceConfig"
    )
    run: Annotated[dict[str, Json], Parameter(parse=False)] = Field(
        default_factory=dict, description="keys of RunConfig"
    )

    sha256: Annotated[dict[str, str], Parameter(parse=False)] = Field(
        default_factory=dict,
        description="hashes of the task file and of users' envs when the run was made; written by"
        " `prorl run`",
    )

    @property
    def num_samples(self) -> int:
        return self.n or (4 if self.policy.partition("?")[0] in ("flaky", POLICIES["flaky"]) else 1)


JobOptions = Annotated[Job | None, Parameter(name="*")]
"""The fields of a job as options of a command: each is spelt and described above alone."""


def chosen(job: Job | None) -> dict[str, Json]:
    """Returns the settings of a job that the command line names."""
    return {} if job is None else job.model_dump(exclude_unset=True)


OF_SUPERVISOR = ("gateway", "models", "socket_dir", "token", "node_id")
"""Keys of the service that the supervisor, or a node's own options, fill in."""

OF_NODE = (
    *("workers", "init", "run", "eval", "pools", "sandbox", "drain_s", "sigterm_drain_s", "trace"),
    *("journal_sync", "backend_key", "advertise"),
)
"""Keys of the service that a node has of its own; the others it gets from its service."""

OF_JOB = frozenset({("run", "env"), *(("service", key) for key in (*OF_SUPERVISOR, "load_code"))})
"""Sections and keys that a job fills in itself."""

EFFECTIVE: Mapping[str, Callable[[str, str], bool]] = {
    "run": lambda section, key: (section, key) not in OF_JOB,
    "eval": lambda section, key: (section, key) not in OF_JOB,
    "serve": lambda section, key: (
        section == "policy" or (section == "service" and key not in OF_SUPERVISOR)
    ),
    "node": lambda section, key: section == "service" and key in OF_NODE,
    "cluster": lambda section, key: section == "service" and key in OF_NODE,
}
"""The test whether a setting changes anything, by command: its section (or key of `Job`) and its
key there.
"""


_SECTIONS: Mapping[str, type[BaseModel]] = {"service": ServiceConfig, "run": RunConfig}


def check_effect(command: str, values: Mapping[str, Json], where: str) -> None:
    """Refuse a setting that the command would ignore. Raises ConfigError."""
    has_effect = EFFECTIVE[command]
    for section in values.keys() & Job.model_fields.keys():  # others are refused as unknown
        keys, below, section_type = [""], values[section], _SECTIONS.get(section)
        if section_type is not None and isinstance(below, Mapping):
            keys = [key for key in below if key in section_type.model_fields]
        for key in keys:
            if not has_effect(section, key):
                name = f"{section}.{key}".rstrip(".")
                users = [other for other, effect in EFFECTIVE.items() if effect(section, key)]
                hint = "it is filled in by the service itself"
                if (section, key) == ("run", "env"):
                    hint = "`env` of the job, or --env, says it"
                if command == "serve" and section == "run":
                    hint = "a client says it: client.create_run(...), or `prorl run`"
                elif users:
                    hint = (
                        f"`{name}` is a setting of {', '.join(f'`prorl {user}`' for user in users)}"
                    )
                raise ConfigError(
                    f"{where}: `{name}` has no effect on `prorl {command}`",
                    "settings that have one",
                    hint,
                )


def job_settings(
    command: str, config: Path | None, flags: Mapping[str, Json], sets: Iterable[str]
) -> Job:
    """Merge all sources; flags that are None were not given. Raises ConfigError, also for a setting
    of the file or of `--set` that the command would ignore.
    """
    values: dict[str, Json] = load_file(config) if config else {}
    _check_keys(values, str(config))
    check_effect(command, values, str(config))
    merge(values, {"service": service_environment()})
    for text in sets:
        assigned = assignment(text)
        check_effect(command, assigned, f"--set {text}")
        merge(values, assigned)
    merge(values, {name: value for name, value in flags.items() if value is not None})
    if "env" in values:
        values["env"] = absolute_env(values["env"])
    return parse(Job, values, str(config) if config else "settings")


def absolute_env(value: Json) -> Json:
    """An env with its settings so that it means the same in every folder: files of settings and of
    texts (`@FILE`) are read, files of code named in full. Raises ConfigError.
    """
    if isinstance(value, str) and value.endswith((".yaml", ".yml", ".json")):
        value = load_file(Path(value))
    settings, here = env_settings.read(value), Path.cwd()
    settings = {
        plugins.absolute(name, here): {key: _text_of(inner) for key, inner in values.items()}
        for name, values in settings.items()
    }
    name = plugins.absolute(env_settings.env_of_all(value), here)
    if name == env_settings.AUTO:
        return settings or name
    return {"name": name, **settings[name]} if name in settings else name


def _text_of(value: Json) -> Json:
    """The text of the file that `@FILE` names; any other value as it is. Raises ConfigError."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{value}: {reason}", "a readable file of text behind the @") from None


def service_settings(
    values: Mapping[str, Json], root: str | Path | None, policy: str = ""
) -> ServiceConfig:
    """The service of a job: its section, with the policy as backend.

    A root that is a URL holds the run directories; control log, sockets and logs stay on this host.
    Raises ConfigError.
    """
    merged = dict(values) | ({} if root is None else _rooted(values, str(root)))
    if policy:
        merged["backends"] = [backend(policy)]
    config = parse(ServiceConfig, merged, "service")
    kinds.check(config.sandbox.kind)
    directory = next(filter(None, map(checkpoint, config.backends)), "")
    if directory and "tokenizer" not in merged:
        config = config.model_copy(update={"tokenizer": directory})
    if config.tokenizer != "bytes" and Path(config.tokenizer).exists():
        config = config.model_copy(update={"tokenizer": str(Path(config.tokenizer).absolute())})
    return config


def check_model(values: Mapping[str, Json], config: ServiceConfig, mend: str) -> None:
    """Refuse a model server whose model is not known: its vocabulary is never guessed. `values`:
    the keys of the service that were given. Raises ConfigError.
    """
    if "tokenizer" in values or config.tokenizer != "bytes":
        return
    for server in filter(is_server, config.backends):
        raise ConfigError(
            f"--policy {server} without its model's directory",
            "tokenizer.json and chat template of the model that it serves",
            mend,
        )


def backend(policy: str) -> str:
    """Returns a policy's backend URL. Raises ConfigError with the nearest policy."""
    if policy == "toy":
        return embedded(str(TOY))
    if (Path(policy) / "config.json").exists():
        return embedded(str(Path(policy).absolute()))
    inside = sorted(Path(policy).glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if inside:
        newest = f"the newest is {inside[-1].parent}"
        raise ConfigError(f"policy {policy!r}, a folder of {len(inside)}", "one checkpoint", newest)
    if policy == "faulty":
        return f"{POLICIES[policy]}?{FAULTS}"
    name, question, parameters = policy.partition("?")
    url = f"{POLICIES.get(name, name)}{question}{parameters}"
    scheme = CATALOGUE.get(scheme_of(url))  # one that lists its policies takes no other
    if has_scheme(url) and (
        not (scheme and scheme.policies) or url.partition("?")[0] in POLICIES.values()
    ):
        return valid_url(url) if is_server(url) else url
    hint = nearest(name.rpartition(":")[2], (*POLICIES, "toy"))
    if scheme_of(url) and not has_scheme(url):
        problem = f"policy {policy!r} of the unknown scheme {scheme_of(url)!r}"
        raise ConfigError(problem, f"one of {examples()}", hint)
    raise ConfigError(f"policy {policy!r}", f"one of {TAKES}", hint)


def _rooted(values: Mapping[str, Json], root: str) -> dict[str, Json]:
    """The settings that a root changes."""
    if "://" not in root:
        return {"root": root}
    store = dict(values.get("store") or {}) | {"url": root.rstrip("/")}
    return {"root": str(local_root(root)), "store": store}


def local_root(url: str) -> Path:
    """Returns the local folder for what belongs to a remote root: the same for the same URL.

    >>> local_root("s3://bucket/runs/")
    PosixPath('prorl-runs/s3-bucket-runs')
    """
    return Path("prorl-runs") / re.sub(r"[^A-Za-z0-9_.]+", "-", url).strip("-")


def run_settings(values: Mapping[str, Json], name: str) -> RunConfig:
    """The run of a job. Raises ConfigError."""
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"run name {name!r}",
            f"none of {', '.join(sorted(RESERVED_NAMES))}",
            "choose another with --name",
        )
    config = parse(RunConfig, {**values, "run_id": name}, "run")
    if config.renderer.model and Path(config.renderer.model).exists():
        model = str(Path(config.renderer.model).absolute())
        renderer = config.renderer.model_copy(update={"model": model})
        config = config.model_copy(update={"renderer": renderer})
    return config


def service_environment() -> dict[str, Json]:
    """Keys of the service from the environment: `PRORL_INIT__SLOTS=8` is `init.slots`."""
    fields = set(ServiceConfig.model_fields)
    values: dict[str, Json] = {}
    for name, text in environment().items():
        path = name.split("__")
        if path[0] in fields and path[0] not in ("token", "socket_dir"):
            merge(values, _nest(path, _scalar(text)))
    return values


def sandbox_environment() -> SandboxConfig:
    """Returns the sandbox settings of the environment variables."""
    return parse(ServiceConfig, service_environment(), "environment").sandbox


def registry_root(flag: Path | None) -> Path:
    """The folder of images: the flag, else the service's key `sandbox.images`, else its default."""
    from prorl.sandbox.images.registry import default_root

    return (flag or sandbox_environment().images or default_root()).absolute()


def assignment(text: str) -> dict[str, Json]:
    """`service.init.slots=8` as a nested mapping.

    >>> assignment("run.sampling.temperature=0.7")
    {'run': {'sampling': {'temperature': 0.7}}}
    """
    key, sign, value = text.partition("=")
    if not sign or not all(key.split(".")):
        raise ConfigError(
            f"--set {text}", "KEY=VALUE", "for example --set run.sampling.temperature=0.7"
        )
    values = _nest(key.split("."), _scalar(value))
    _check_keys(values, f"--set {text}")
    return values


def _check_keys(values: Mapping[str, Json], where: str) -> None:
    """Name the right home of a key that stands at the wrong level, which pydantic cannot know."""
    for key in values:
        if key in Job.model_fields:
            continue
        homes = [f"{name}.{key}" for name, model in _SECTIONS.items() if key in model.model_fields]
        if homes:
            raise ConfigError(
                f"{where}: unknown key `{key}`",
                f"one of {', '.join(Job.model_fields)}",
                f"did you mean `{homes[0]}`?",
            )


def _scalar(text: str) -> Json:
    """Parses a value as YAML, except for a mapping without braces: `command: python3 @loop.py` is
    an agent's name.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.lstrip().startswith("{") else value


def _nest(path: list[str], value: Json) -> dict[str, Json]:
    for name in reversed(path):
        value = {name: value}
    result: dict[str, Json] = value
    return result


def merge(into: dict[str, Any], values: Mapping[str, Json]) -> None:
    """Put values over those that are there, mapping by mapping."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            below = into.get(name)
            into[name] = dict(below) if isinstance(below, dict) else {}
            merge(into[name], value)
        else:
            into[name] = value
