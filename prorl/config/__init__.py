"""Config is data: pydantic models that name what they expect and refuse what they do not know.

Two kinds: `ServiceConfig` is how a service runs on this machine (YAML files under `configs/`,
written resolved to ROOT/service.json and passed to every process); `RunConfig` is one run (the body
of `POST /v1/runs`, and `config` in a run's manifest). Precedence: default < file < environment
`PRORL_*` < flag. Nothing here builds a live object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prorl import env_settings, network_policy
from prorl.config.renderer import RendererSpec
from prorl.config.trackers import TrackerName
from prorl.config.validation import explain
from prorl.errors import ConfigError
from prorl.filters import FILTERS, PASS_RATE
from prorl.graph import GRAPH
from prorl.linux import failpoints
from prorl.states import TASK_LINEAGES, Lineage
from prorl.types import RolloutLimits, SamplingParams

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
"""The names that a run, worker or node may have: it becomes a file name."""


RESERVED_NAMES = frozenset(
    {
        *("logs", "lock", "token", "signing.key"),
        *("tls", "join", "placers", "trace", "tracked", "journal", "quarantine"),
        *("service.json", "control.lock", "control.db", "control.db-wal", "control.db-shm"),
    }
)
"""The names in a root besides run directories: whoever puts something there names it here."""

JOB_FILE = "job.json"
"""The file of a `prorl run`: what it was asked, with the hashes of its files."""

MAX_INT32 = (1 << 31) - 1
"""The greatest number that an int32 holds: a column's, or a model server's field."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def _is_long(value: Any) -> bool:
    match value:
        case int():
            return not -(1 << 63) <= value < 1 << 63
        case dict():
            return any(map(_is_long, value.values()))
        case list() | tuple():
            return any(map(_is_long, value))
    return False


class StrictModel(BaseModel):
    """Frozen, and refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class StageConfig(StrictModel):
    """One stage's pool on this node."""

    own_processes: int = Field(
        default=0,
        ge=0,
        le=64,
        description="processes of its own, beside the workers; 0 = the stage is a part of each"
        " worker",
    )
    slots: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="rollouts that the stage works on at a time, for each process",
    )
    finished_bytes: int = Field(
        default=64 << 20,
        ge=1 << 20,
        description="bytes of finished rows that each worker keeps until the next stage takes them",
    )


class BuildConfig(StrictModel):
    """Holds how images are built from the Dockerfiles of tasks; a change builds them anew."""

    bases: dict[str, str] = Field(
        default_factory=dict,
        description="for each reference of a FROM line (key) the image that is used instead",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="variables of RUN lines during the build; they are not in the image",
    )
    args: dict[str, str] = Field(default_factory=dict, description="build arguments")
    files: dict[str, str] = Field(
        default_factory=dict,
        description="files of this host (keys) and their paths in the build (values): CA files,"
        " pip.conf; they are not in the image",
    )
    secrets: dict[str, str] = Field(
        default_factory=dict,
        description="files of this host, by the id that RUN --mount=type=secret names",
    )
    store: str = Field(
        default="",
        description="folder or URL by which nodes share what is built: one builds, others fetch",
    )


class NetworkConfig(StrictModel):
    """Holds what sandboxes may reach at most, always through the node's proxy (docs/network.md)."""

    mode: Literal["no-network", "allowlist", "public"] = Field(
        default="no-network",
        description="the most that a task may ask for as network_mode; `public` is any public host",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="with mode `allowlist`: hosts that tasks may reach, NAME or *.NAME"
    )
    mirrors: tuple[str, ...] = Field(
        default=(),
        description="hosts of package mirrors, HOST or HOST:PORT, which every sandbox with a"
        " network may reach, also at a private address",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="variables of sandboxes with a network: PIP_INDEX_URL, NPM_CONFIG_REGISTRY ...",
    )
    files: dict[str, str] = Field(
        default_factory=dict,
        description="files of this node (keys) and their paths in sandboxes with a network"
        " (values): CA files, pip.conf, apt's sources, .npmrc; read-only, instead of"
        " what an image has there",
    )
    upstream: str = Field(
        default="",
        repr=False,
        description="proxy that this node itself must use: http://[USER:PASSWORD@]HOST:PORT",
    )
    upstream_resolves: bool = Field(
        default=False,
        description="true = `upstream` gets host names, resolves them itself and must refuse"
        " private addresses; false = it gets addresses that were checked here",
    )
    closed_hosts: tuple[str, ...] = Field(
        default=(),
        description="HOST or HOST:PORT that no sandbox may reach, in addition to private addresses,"
        " model servers and the gateway",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return network_policy.read_hosts(value)

    @field_validator("mirrors", "closed_hosts")
    @classmethod
    def _are_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            network_policy.read_target(text)
        return value

    @field_validator("files")
    @classmethod
    def _are_paths(cls, value: dict[str, str]) -> dict[str, str]:
        for path in (*value, *value.values()):
            if not path.startswith("/") or ":" in path or os.path.normpath(path) != path:
                raise ValueError(f"{path!r} is no absolute path without `:` and `..`")
        return value

    @field_validator("upstream")
    @classmethod
    def _is_proxy(cls, value: str) -> str:
        if value and network_policy.proxy_problem(value):
            raise ValueError(network_policy.proxy_problem(value))
        return value

    @model_validator(mode="after")
    def _hosts_have_their_mode(self) -> Self:
        if self.allowed_hosts and self.mode != "allowlist":
            raise ValueError("mode: allowlist beside allowed_hosts")
        return self

    @property
    def most(self) -> network_policy.NetworkPolicy:
        return network_policy.NetworkPolicy(self.mode, self.allowed_hosts)

    def settings(self, closed_urls: Iterable[str]) -> dict[str, Any]:
        """Returns the settings of sandboxd, except for `upstream`, which may hold a password and is
        therefore an environment variable. `closed_urls`: where the service and its model servers
        are.
        """
        if self.mode == network_policy.NO_NETWORK:
            return {}
        host_keys = {"mode", "allowed_hosts", "env", "files", "upstream_resolves"}
        service = filter(None, map(network_policy.target_of, closed_urls))
        return {
            **self.model_dump(include=host_keys),
            "mirrors": [network_policy.read_target(host) for host in self.mirrors],
            "closed": [*service, *map(network_policy.read_target, self.closed_hosts)],
        }


class SandboxConfig(StrictModel):
    """Settings of this node's sandboxd."""

    kind: str = Field(
        default="auto",
        description="kind of sandbox (`prorl doctor` lists them); auto = pyns if it works here,"
        " else apptainer",
    )
    max_sandboxes: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="sandboxes at a time; default: computed from the slots of this node's stages"
        " (docs/operating.md)",
    )
    warm: int = Field(
        default=0,
        ge=0,
        le=256,
        description="sandboxes that are started ahead of their use, for each recently used spec",
    )
    images: Path | None = Field(
        default=None,
        description="folder of this node's images (`prorl image`); default ~/.cache/prorl/images",
    )
    pull: bool = Field(
        default=True,
        description="pull a task's docker://REFERENCE when it is needed; false: only images that"
        " `prorl image pull` brought are used",
    )
    mirrors: dict[str, str] = Field(
        default_factory=dict,
        description="for each container registry's host the URL of a mirror, which is tried first",
    )
    build: BuildConfig = BuildConfig()
    max_memory_mb: int = Field(
        default=0,
        ge=0,
        description="the most memory of a sandbox, written files included; 0 = no bound",
    )
    max_storage_mb: int = Field(
        default=0,
        ge=0,
        description="the most that a sandbox may write over its image; 0 = no bound",
    )
    max_cpus: float = Field(
        default=0.0, ge=0, description="the most cores of a sandbox; 0 = no bound"
    )
    network: NetworkConfig = NetworkConfig()
    image: str = Field(
        default="",
        description=(
            "image of tasks that name none: a name or an absolute path; empty = the host's /usr"
        ),
    )
    snapshot_bytes: int = Field(
        default=2 << 30,
        ge=0,
        description="bytes of prepared workspaces that are kept on disk for a task's further"
        " rollouts",
    )


class StoreConfig(StrictModel):
    """Holds how the store batches parts."""

    flush_s: float = Field(
        default=0.5,
        gt=0,
        le=60,
        description="a Parquet part is written at most so many seconds after its first row arrived",
    )
    flush_bytes: int = Field(
        default=16 << 20,
        ge=1 << 16,
        description="a part is also written once its rows have so many bytes",
    )
    hot_bytes: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="bytes of recent rows that are kept memory-mapped for trainers' streams",
    )
    own_process: bool = Field(
        default=False,
        description="the store gets a process of its own, so that neither it nor the gateway dies"
        " with the other; costs 5 ms of CPU a rollout and 60 to 90 MB",
    )
    url: str = Field(
        default="", description="where run directories lie if not in the root: s3://..."
    )
    compact_every_commits: int = Field(
        default=256, ge=0, description="commits from one compaction to the next; 0 = never compact"
    )
    keep_replaced_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds that replaced parts stay after a compaction, for open readers",
    )
    close_after_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds until the store closes a finished run that nobody reads",
    )


class Listener(NamedTuple):
    """Holds what a service shows to other hosts."""

    host: str
    port: int
    advertised: str

    @property
    def url(self) -> str:
        return f"https://{self.advertised}:{self.port}"

    @property
    def gateway(self) -> str:
        """Flight location that nodes dial for control and leases."""
        return f"grpc+tls://{self.advertised}:{self.port + 1}"

    @property
    def store(self) -> str:
        """Flight location that trainers dial."""
        return f"grpc+tls://{self.advertised}:{self.port + 2}"

    def bound(self, offset: int) -> str:
        return f"grpc+tls://{self.host}:{self.port + offset}"


class ServiceConfig(StrictModel):
    """One service on one root. Locations are filled in by the supervisor before processes start."""

    root: Path = Field(
        default=Path("prorl-runs"), description="holds control.db and the run directories"
    )
    node_id: str = Field(default="local", description="name of this node in rows and status")
    workers: int | Literal["auto", "nodes"] = Field(
        default="auto",
        description="processes that run the stages INIT, RUN and EVAL; 0 = they run in the process"
        " `service`, with gateway and store; auto = 0 up to four cores, else 1; nodes ="
        " on other hosts only",
    )
    host: Literal["127.0.0.1", "localhost", "::1"] = Field(
        default="127.0.0.1", description="address on which HTTP and Flight listen on this host"
    )
    http_port: int = Field(
        default=0, ge=0, le=65535, description="HTTP port on this host; 0 = any free one"
    )
    listen: str = Field(
        default="",
        description=(
            "HOST:PORT for trainers and nodes on other hosts, always over TLS: HTTPS at"
            " PORT, Flight at PORT + 1 (gateway) and PORT + 2 (store); clients need a file"
            " of ROOT/join"
        ),
    )
    advertise: str = Field(
        default="", description="address that other hosts dial; needed if `listen` is 0.0.0.0"
    )
    guests: int = Field(
        default=0,
        ge=0,
        le=65535,
        description=(
            "port at which guests from elsewhere lease rollouts (docs/guests.md); 0 = none."
            " It is open to this host, or with `listen` at that address over TLS; further"
            " RUN workers use the next ports"
        ),
    )
    certificate_days: float = Field(
        default=90,
        gt=0,
        le=3650,
        description="days that a certificate of the service or of a node is valid; both renew"
        " theirs",
    )
    gateway: str = Field(
        default="",
        description="Flight location of a gateway on another host; set by `prorl node`",
    )
    backends: tuple[str, ...] = Field(
        default=(), description="model servers: scripted:oracle, embedded:DIR, http://HOST:PORT ..."
    )
    backend_key: str = Field(
        default="",
        repr=False,
        description="bearer token of model servers; for embedded ones it is generated",
    )
    models: dict[str, str] = Field(
        default_factory=dict,
        description="address -> URL of the checkpoint that is served there; set by the supervisor",
    )
    model: str = Field(
        default="",
        description="model name of the HTTP model servers; empty = the only one that they serve",
    )
    tokenizer: str = Field(default="bytes", description="`bytes` or a Hugging Face directory")
    init: StageConfig = StageConfig(slots=8)
    """The rows that it has ready before RUN has room: each is a sandbox that waits."""
    run: StageConfig = StageConfig(slots=32)
    eval: StageConfig = StageConfig()
    pools: dict[str, StageConfig] = Field(
        default_factory=dict, description="settings of further stages (`prorl.graph`), by name"
    )
    sandbox: SandboxConfig = SandboxConfig()
    store: StoreConfig = StoreConfig()
    drain_s: float = Field(
        default=600.0,
        ge=0,
        le=7 * 86400,
        description="seconds that a node which shall leave may use to finish its rollouts",
    )
    sigterm_drain_s: float = Field(
        default=20.0,
        ge=0,
        le=86400,
        description="the same after SIGTERM, whose sender kills soon (Slurm: after 30 s)",
    )
    journal_sync: bool = Field(
        default=False,
        description="wait for the disk after each record of the journal of turns, so that it"
        " survives a power cut",
    )
    load_code: bool = Field(
        default=False,
        description=(
            "tasks and runs may name envs and agents as `module:attr` or `file.py:attr`,"
            " and the service runs their code; always on with `prorl run`"
        ),
    )
    max_queued_rollouts: int = Field(
        default=1_000_000,
        ge=1,
        description="rollouts of all runs that may wait to be leased; more are refused with HTTP"
        " 429",
    )
    trace: bool = Field(
        default=False,
        description="write to ROOT/trace when each row passes from stage to stage (`prorl bench"
        " pipeline`)",
    )
    socket_dir: Path = Field(
        default=Path(), description="short private directory for sockets; set by the supervisor"
    )
    token: str = Field(
        default="",
        repr=False,
        description="bearer token; set by the supervisor from ROOT/token (0600)",
    )

    @field_validator("listen")
    @classmethod
    def _listen_is_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and 0 < int(port) < 65534):
            raise ValueError("HOST:PORT, with PORT below 65534 (the two above it are used too)")
        return value

    @field_validator("workers")
    @classmethod
    def _workers_is_a_count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 0 <= value <= 64:
            raise ValueError("0 to 64, auto or nodes")
        return value

    @model_validator(mode="after")
    def _stages_leave_only_where_rows_are_kept(self) -> Self:
        for stage in set(GRAPH.names) - set(GRAPH.separable):
            if self.pool(stage).own_processes:
                able = ", ".join(GRAPH.separable)
                raise ValueError(f"{stage}.own_processes 0: only {able} may leave its chain")
        return self

    @model_validator(mode="after")
    def _listen_has_address(self) -> Self:
        if self.listen.startswith(("0.0.0.0:", "[::]:")) and not self.advertise:
            raise ValueError(
                "`advertise`, the address that other hosts dial, where `listen` is on all addresses"
            )
        return self

    @property
    def gateway_flight(self) -> str:
        return self.gateway or self.worker_flight("service")

    @property
    def listener(self) -> Listener | None:
        """Tells where other hosts reach the service, or None when they do not."""
        if not self.listen:
            return None
        host, _, port = self.listen.rpartition(":")
        return Listener(host, int(port), self.advertise or host)

    def guests_at(self, worker: str) -> tuple[str, int, str] | None:
        """Returns where a RUN worker of this host lets guests in: host, port, URL; None where it
        does not. Nodes of other hosts have no key that guests' tokens could be checked with.
        """
        if not self.guests or self.gateway:
            return None
        port, at = self.guests + int(worker.rpartition("-")[2]), self.listener
        if at is None:
            return self.host, port, f"http://{self.host}:{port}"
        return at.host, port, f"https://{at.advertised}:{port}"

    @property
    def tls_dir(self) -> Path:
        """Holds the authority's key and the service's own credentials (0600)."""
        return self.root / "tls"

    def run_directory(self, run_id: str) -> str:
        return f"{self.store.url.rstrip('/') or self.root}/{run_id}"

    @property
    def sandbox_socket(self) -> Path:
        return self.socket_dir / "sandboxd.sock"

    def worker_name(self, worker: str) -> str:
        """Returns what a worker is called in the whole service, e.g. `worker-0` or
        `node-7/worker-0`.
        """
        return f"{self.node_id}/{worker}" if self.gateway else worker

    def pool(self, stage: str) -> StageConfig:
        own = {"init": self.init, "run": self.run, "eval": self.eval}
        return own.get(stage) or self.pools.get(stage, StageConfig())

    def worker_flight(self, process: str) -> str:
        """Returns where a process of this host serves its edges to the others of this host."""
        return f"grpc+unix://{self.socket_dir}/{process}.sock"


MAX_CALL_TOKENS = 131_072


_SAMPLING, _LIMITS = SamplingParams(), RolloutLimits()
"""They own the defaults; here are the bounds of what a user may say."""


class Sampling(StrictModel):
    """Holds how tokens are sampled; see `prorl.types.SamplingParams`."""

    temperature: float = Field(
        default=_SAMPLING.temperature,
        ge=0.0,
        le=10.0,
        description="temperature of the sampled answers",
    )
    top_p: float = Field(
        default=_SAMPLING.top_p,
        gt=0.0,
        le=1.0,
        description="1 = no cut; a run that trains needs 1, otherwise logprobs are not the model's",
    )
    top_k: int = Field(
        default=_SAMPLING.top_k,
        ge=0,
        le=MAX_INT32,
        description="0 = no cut; a run that trains needs 0",
    )
    max_tokens: int = Field(
        default=_SAMPLING.max_tokens,
        ge=1,
        le=MAX_CALL_TOKENS,
        description="tokens of one model call; if it is not set, a model that thinks has"
        " limits.max_tokens",
    )

    @property
    def is_cut_off(self) -> bool:
        """Tells whether unlikely tokens are never sampled, so that logprobs are not the policy's
        own.

        Temperature 0 is the extreme: only the likeliest token is sampled.
        """
        return self.temperature == 0 or self.top_p < 1.0 or self.top_k > 0

    def params(self) -> SamplingParams:
        return SamplingParams(**self.model_dump())


WHOLE_DISTRIBUTION = (
    "a temperature above 0, top_p 1 and top_k 0 (otherwise the recorded logprobs are not the"
    " policy's own)"
)


class Limits(StrictModel):
    """Budgets of a rollout; see `prorl.types.RolloutLimits`."""

    init_s: float = Field(
        default=_LIMITS.init_s, gt=0, le=86400, description="seconds of INIT, for each attempt"
    )
    run_s: float = Field(
        default=_LIMITS.run_s,
        gt=0,
        le=86400,
        description="seconds of model and tool time in RUN; if it is not set, a model that thinks,"
        " or a program, has 1800",
    )
    eval_s: float = Field(
        default=_LIMITS.eval_s,
        gt=0,
        le=86400,
        description="seconds of one grading, tries at the sandbox included; a grader that fails is"
        " called again, until twice as long has passed",
    )
    queue_s: float = Field(
        default=_LIMITS.queue_s,
        gt=0,
        le=7 * 86400,
        description="seconds that a rollout may wait in queues, in all",
    )
    tool_s: float = Field(
        default=_LIMITS.tool_s, gt=0, le=86400, description="seconds of one tool call"
    )
    max_turns: int = Field(
        default=_LIMITS.max_turns,
        ge=1,
        le=1000,
        description="model calls; if it is not set, a program has 200",
    )
    max_tokens: int = Field(
        default=_LIMITS.max_tokens,
        ge=16,
        le=1 << 20,
        description="tokens of a sequence, its context included",
    )
    max_attempts: int = Field(
        default=_LIMITS.max_attempts,
        ge=1,
        le=100,
        description="attempts that may fail because of the infrastructure; 3 = two retries",
    )
    max_worker_losses: int = Field(
        default=_LIMITS.max_worker_losses,
        ge=0,
        le=1000,
        description="further attempts that may be lost because a worker died",
    )
    artifact_mb: int = Field(
        default=_LIMITS.artifact_mb,
        ge=0,
        le=256,
        description="size up to which a change is copied into a fresh sandbox for Harbor's tests; a"
        " larger one is tested in the agent's own sandbox",
    )

    def limits(self) -> RolloutLimits:
        return RolloutLimits(**self.model_dump())


class RunConfig(StrictModel):
    """One run: what `POST /v1/runs` takes."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_long_number(cls, data: Any) -> Any:
        if _is_long(data):  # neither the manifest nor a column holds it
            raise ValueError("whole numbers of at most 64 bits")
        return data

    run_id: str = Field(description="name of the run and of its directory")
    filter: str = Field(
        default="none",
        description=f"{', '.join(FILTERS)}, {PASS_RATE}, or SQL; on a command line also a file",
    )
    delivery: Literal["store", "stream"] = Field(
        default="store",
        description="stream = a trainer gets each kept group; store = groups are only stored as"
        " Parquet",
    )
    agent: str = Field(
        default="native",
        description="who drives the policy: native (prorl's own tool loop), a program that runs in"
        " the sandbox (mini-swe-agent, codex ...: docs/agents.md), 'command: ARGV', or a"
        " class of yours",
    )
    renderer: RendererSpec = RendererSpec()
    env: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="settings of the envs of its tasks: {name: math, tools: []}, 'math?tools=none',"
        " or {math: {tools: []}} for several envs; a row's `data.settings` win over"
        " them. `prorl schema --settings` lists those of each env. `prorl run` fills it"
        " in from the job's `env`",
    )
    tools: tuple[str, ...] = Field(
        default=(),
        description="names of the tools that its tasks offer, if you know them beforehand: then a"
        " model that takes no tools is refused before the run exists, and not only when"
        " tasks are submitted. `prorl run` fills it in",
    )
    system_message: bool = Field(
        default=False,
        description="whether its tasks begin with a system message; checked as `tools` is",
    )
    seed: int = Field(default=0, ge=0, lt=1 << 62, description="the same seed repeats a seeded run")
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    backends: tuple[str, ...] = Field(
        default=(), description="model servers for this run only; empty = the service's"
    )
    target_groups: int = Field(
        default=0,
        ge=0,
        description="end the run when so many groups are kept; 0 = when all submitted groups are"
        " done",
    )
    max_open_groups: int = Field(
        default=256, ge=1, description="groups that may be sampled at a time"
    )
    max_uncommitted_groups: int = Field(
        default=256,
        ge=1,
        description="delivery=stream: the most groups that are sampled or kept and not yet"
        " committed by the trainer; then the run pauses",
    )
    epochs: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="the submitted tasks are a dataset, of which each task is sampled so many"
        " times, in an order by `seed`; 0 = each submitted group is sampled once",
    )
    server_priority: bool = Field(
        default=False,
        description="with `epochs`: model servers prefer the rollouts that are expected to be"
        " longest (vLLM: `--scheduling-policy priority`)",
    )
    groups_per_step: int = Field(
        default=0,
        ge=0,
        description="groups that the trainer takes for a step; bounds how many are sampled ahead"
        " (docs/dapo.md); 0 = not known",
    )
    early_stop_valid: int = Field(
        default=0,
        ge=0,
        description="once so many rollouts of a group are valid, the others have only"
        " `straggler_grace_s` left; 0 = wait for all",
    )
    straggler_grace_s: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="seconds that the rest of a group has after `early_stop_valid` rollouts are"
        " valid",
    )
    max_staleness: int = Field(
        default=-1,
        ge=-1,
        description="how many versions the oldest token of a group may be behind the published one"
        " when the group is handed out; -1 = any number",
    )
    skip_invalid: bool = Field(
        default=False,
        description="a prompt longer than `limits.max_tokens` fails only its own rollouts"
        " (`prompt_too_long`); otherwise the first one ends the run",
    )
    journal: Literal["off", "node"] = Field(
        default="node",
        description="node = completed turns are kept on the node's disk, so that after a worker's"
        " death the next one goes on with them",
    )
    on_lost_tool_call: Literal["report", "fail"] = Field(
        default="report",
        description="a tool call that may have run when its worker died: report it to the policy,"
        " or fail the attempt",
    )
    train: tuple[Lineage, ...] = Field(
        default=TASK_LINEAGES,
        min_length=1,
        description="which conversations of a rollout train: main (the one with the task),"
        " compacted (main after its history was summarised), subagent (another one with"
        " tools), auxiliary (another one without tools, such as for a title)",
    )
    routed_experts: bool = Field(
        default=False,
        description="store which experts each token was routed to; model servers need"
        " --enable-return-routed-experts",
    )
    track: tuple[TrackerName, ...] = Field(
        default=(),
        description="trackers that get the run's curves (tensorboard, wandb) and its rollouts as"
        " traces (otlp), each in a process beside the service; docs/viewer.md",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _env_settings(cls, value: Any) -> dict[str, dict[str, Any]]:
        try:
            return env_settings.read(value)
        except ConfigError as error:
            raise ValueError(". ".join(filter(None, (error.expected, error.hint)))) from None

    @field_validator("run_id")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "letters, digits, `_`, `.`, `-`, at most 128, starting with a letter or digit"
            )
        if value in RESERVED_NAMES:
            raise ValueError(f"none of {', '.join(sorted(RESERVED_NAMES))}")
        return value

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if self.delivery == "stream" and self.sampling.is_cut_off:
            raise ValueError(f"for delivery `stream`: {WHOLE_DISTRIBUTION}")
        return self


def parse(model: type[ModelT], values: Any, where: str) -> ModelT:
    """Validate `values`; raises ConfigError with one clear line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, model, where) from None


def check_failpoints() -> None:
    """Refuse faults of `PRORL_FAILPOINTS` that do not exist. Raises ConfigError."""
    try:
        failpoints.parse(os.environ.get(failpoints.VARIABLE, ""))
    except ValueError as error:
        raise ConfigError(str(error), hint="unset it: it is for tests") from None


def environment() -> dict[str, str]:
    """Settings from the environment: `PRORL_HTTP_PORT=8000` is `http_port`."""
    return {
        name.removeprefix("PRORL_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("PRORL_")
    }
