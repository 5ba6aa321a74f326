"""The keys of Harbor's `task.toml`, versions 1.0 to 1.4.

Every model keeps the keys that it does not know, so that `unknown_keys` can report them. Values are
checked as far as this project uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
"""At most what `run.limits` takes."""
Megabytes = Annotated[int, Field(gt=0, le=1 << 30)]
User = str | int
Variables = dict[str, str]
NetworkMode = Literal["no-network", "public", "allowlist"]


_UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _size_mb(name: str, text: str | None, size_mb: int | None) -> int | None:
    """The size of the deprecated key `name` in MB. Raises ValueError."""
    if text is None:
        return size_mb
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    try:
        parsed_mb = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{name} = {text!r} is no size such as 512M or 2G") from None
    if size_mb not in (None, parsed_mb):
        raise ValueError(f"{name} = {text!r} contradicts {name}_mb = {size_mb}")
    return parsed_mb


class HarborModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class HarborPhase(HarborModel):
    """Keys that `[agent]` and `[verifier]` share."""

    user: User | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class HarborAgent(HarborPhase):
    timeout_sec: Seconds | None = None


class Healthcheck(HarborModel):
    """Docker's HEALTHCHECK: a command that must succeed before the agent starts."""

    command: str = Field(min_length=1)
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1)


class Environment(HarborModel):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0, le=1 << 16, allow_inf_nan=False)
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    memory: str | None = None
    """Deprecated: `2G`, `512M`."""
    storage: str | None = None
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    """Deprecated: true is `public`, false is `no-network`."""

    @model_validator(mode="after")
    def _read_deprecated_sizes(self) -> Environment:
        self.memory_mb = _size_mb("memory", self.memory, self.memory_mb)
        self.storage_mb = _size_mb("storage", self.storage, self.storage_mb)
        return self

    @property
    def network(self) -> str:
        """Tells what the author allows: Harbor's default is `public`."""
        if self.network_mode is not None:
            return self.network_mode
        return "no-network" if self.allow_internet is False else "public"


class Collect(HarborModel):
    """A command in the agent's environment after its end, before artifacts are collected."""

    command: str = Field(min_length=1)
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class Verifier(HarborPhase):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = []

    @property
    def is_separate(self) -> bool:
        """Tells whether the verifier runs in an environment of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class HarborSolution(HarborModel):
    env: Variables = {}


class Artifact(HarborModel):
    """A file or folder that crosses from the agent's environment to the verifier's."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class Step(HarborModel):
    """One of the steps that an agent plays in a row, in the same environment."""

    name: str = Field(pattern=r"^[^<>:\"/\\|?*\x00-\x1f\x7f]*[^<>:\"/\\|?*\x00-\x1f\x7f. ]$")
    """Its folder below `steps`."""
    agent: HarborAgent = HarborAgent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    """With less the further steps are not played."""
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = []


class Package(HarborModel):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class TaskToml(HarborModel):
    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = {}
    """The author's own: nothing reads it."""
    verifier: Verifier = Verifier()
    agent: HarborAgent = HarborAgent()
    environment: Environment = Environment()
    solution: HarborSolution = HarborSolution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] | None = None
    artifacts: list[str | Artifact] = []

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, data: Any) -> Any:
        """Versions 1.0 to 1.2 call the key `version`."""
        if isinstance(data, dict) and "version" in data:
            renamed = {key: value for key, value in data.items() if key != "version"}
            return {"schema_version": data["version"], **renamed}
        return data


def unknown_keys(model: BaseModel, place: str = "") -> Iterator[str]:
    """Dotted names of the keys that no field has.

    >>> list(unknown_keys(TaskToml.model_validate({"agent": {"timeout": 3}, "color": "red"})))
    ['color', 'agent.timeout']
    """
    yield from (f"{place}{name}" for name in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from unknown_keys(value, f"{place}{name}.")
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, BaseModel):
                    yield from unknown_keys(entry, f"{place}{name}.")
