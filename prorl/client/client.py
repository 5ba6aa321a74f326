"""`connect` and `Client`: what a trainer, a notebook and the CLI reach a service with.

They reach a replay, too, and are synchronous on purpose.

    client = prorl.connect("http://127.0.0.1:8000")
    client.create_run(run_id="mine", filter="dapo", delivery="stream")
    client.submit("mine", tasks, n=8, last=True)
    for batch in client.stream("mine", groups_per_batch=32):
        loss = step(batch.torch())    # token_ids, cu_seqlens ...: Arrow's memory as tensors
        save_checkpoint(weights, batch.cursor)
        client.commit(batch)

Invariants: nothing that is repeated after a lost answer can happen twice (a submission carries
idempotency keys, everything else is named); a stream goes on where its cursor says, over restarts
of the service. Not promised: that a group comes only once to a trainer that does not keep its
cursor, or that two processes may share one consumer name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import stamina
from msgspec.structs import replace

from prorl.client.advantages import Advantages, add_advantages
from prorl.client.fetch import Fetched, FlightSource
from prorl.client.http import WAIT_S, Http, RootAddress
from prorl.client.packed import PackedBatch, regroup
from prorl.client.ranks import RankShare, check_rank, share
from prorl.errors import ConfigError, NotFoundError, UnavailableError, UserError
from prorl.flight.ticket import Cursor, Ticket
from prorl.net.join import Join
from prorl.net.tls import Credentials
from prorl.pluralize import pluralize
from prorl.task_json import check_values
from prorl.types import Json, RolloutState, SamplingParams, Task
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

ResultT = TypeVar("ResultT")

GROUPS_PER_REQUEST = 500
LOOK_S = 0.5
"""Between two looks at an evaluation."""

MAX_WAIT_S = wait_limit_s("client.stream")

RETRY_S = wait_limit_s("client.retry")

# Its library names neither the service nor the reason; the error at the end does.
logging.getLogger("stamina").addHandler(logging.NullHandler())
log = logging.getLogger("prorl.client")


def connect(url: str | Path, token: str | None = None, *, retry_s: float = RETRY_S) -> Client:
    """A client of a service or of a replay.

    A service is the local root directory that it works on, `http://host:port` on the same host, or
    a join file `FILE.json` from another one; a replay is `grpc://host:port`. The token is the
    argument, else `PRORL_TOKEN`, else the root's own. Nothing is contacted yet. `retry_s`: how long
    a request looks for a gateway that does not answer; that of a root may have another port then.
    Raises ConfigError.
    """
    url = str(url)
    token = os.environ.get("PRORL_TOKEN", "") if token is None else token
    if url.startswith(("http://", "https://")):
        return Client(http=Http(url, token, retry_s=retry_s))
    if url.startswith(("grpc://", "grpc+tcp://", "grpc+tls://", "grpc+unix://")):
        return Client(flight=url, token=token)
    if url.endswith(".json"):
        join = Join.read(Path(url))
        credentials, token = join.credentials, token or join.token
        http = Http(join.url, token, retry_s=retry_s, credentials=credentials)
        return Client(http=http, credentials=credentials)
    if (scheme := url.partition(":/")[0]).isalnum() and ":/" in url:
        raise ConfigError(
            f"{url}: a store ({scheme}://), where no service listens",
            "http://HOST:PORT, a join file, or the local root of the service that writes there",
            "prorl.open(URL/RUN) and `prorl show`, `sql`, `verify` read what is stored",
        )
    return Client(http=Http(RootAddress(Path(url), token).address, retry_s=retry_s))


class RunSnapshot(dict[str, Json]):
    """State, settings and counters of a run, as `GET /v1/runs/RUN` answers; prints as one line.

    >>> counts = {"queued": 2, "running": 1, "completed": 5}
    >>> RunSnapshot(run_id="mine", state="open", counts=counts, mean_reward=0.5, version=3)
    <run mine: open, 5 of 8 rollouts ended, reward 0.500, policy version 3; 5 keys>
    """

    def __repr__(self) -> str:
        counts, mean = self.get("counts") or {}, self.get("mean_reward")
        num_ended = sum(num for state, num in counts.items() if RolloutState(state).terminal)
        words = (
            str(self.get("state")),
            f"{num_ended:,} of {pluralize(sum(counts.values()), 'rollout')} ended",
            "" if mean is None else f"reward {mean:.3f}",
            f"policy version {self.get('version', 0)}",
            f"stalled: {self['stalled']}" if self.get("stalled") else "",
        )
        known = pluralize(len(self), "key")
        return f"<run {self.get('run_id')}: {', '.join(filter(None, words))}; {known}>"


class Client:
    """A replay only streams, commits and says its status."""

    def __init__(
        self,
        *,
        http: Http | None = None,
        flight: str = "",
        token: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        """`token` is for `flight`, a replay's; a service is shown that of `http`."""
        self._credentials = credentials
        self._http_or_none, self._location, self._token = http, flight, token
        self._source: FlightSource | None = None
        self.on_note: Callable[[str], object] = log.warning
        """Takes what the service notes of submitted tasks: they ask for more network than it has
        granted.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def create_run(self, **config: Json) -> RunSnapshot:
        """Make a run of `prorl.config.RunConfig`'s settings. Waits until its chat template is
        proved. The same settings again give the run as it is; others: ConflictError.
        """
        while True:
            view = RunSnapshot(self._http.request("POST", "v1", "runs", body=config))
            if view["state"] != "proving":
                return view

    def submit(
        self,
        run: str,
        tasks: Iterable[Task | Mapping[str, Json]],
        n: int = 8,
        *,
        key: str = "",
        first: int = 0,
        sampling: SamplingParams | None = None,
        extra: Mapping[str, Json] | None = None,
        last: bool = False,
    ) -> list[Json]:
        """Ask for n sibling rollouts of each task; returns the service's answer per group.

        `key` names the submission: group i, counted from `first`, has the idempotency key `KEY/i`,
        so that the same call again, after a crash too, adds nothing. Without one a random key makes
        each call a submission of its own (retries inside a call still add nothing). `last` says
        that no more will come, so that the run can finish; with no tasks it says that alone. To a
        run with `epochs` this is its dataset, sampled once it is whole; the answer has no groups.
        Raises ConflictError for a used key with other content. What the service notes of
        the tasks goes to `on_note`.
        """
        if isinstance(tasks, str | Path | Mapping):
            raise UserError(
                f"tasks {tasks!r}"[:300], "tasks", "prorl.load_tasks(FILE) gives those of a file"
            )
        key = key or uuid.uuid4().hex
        common: dict[str, Json] = {}
        if sampling is not None:
            # who is served first is the run's to say
            common["sampling"] = {k: v for k, v in asdict(sampling).items() if k != "priority"}
        if extra:
            common["extra"] = dict(extra)
        bodies = (
            {"task": _task_body(task, extra), "n": n, "key": f"{key}/{i}", **common}
            for i, task in enumerate(tasks, first)
        )
        return self._send_groups(run, bodies, last)

    def evaluate(
        self,
        run: str,
        tasks: Iterable[Task | Mapping[str, Json]],
        n: int = 1,
        *,
        sampling: SamplingParams | None = None,
        **config: Json,
    ) -> RunSnapshot:
        """Returns how good the policy is that serves now: tasks as a run of their own, waited for.

        What `client.run` says of it at its end (`state`, `mean_reward`, `counts`). Said again under
        the same name, after a crash too, it goes on and asks nothing twice. A training run beside
        it is served meanwhile, each with a fair share of the slots. Publish no weights to its
        servers meanwhile: they sample from then on, and a rollout with none but such tokens, whose
        version is unknown (-1), is not `valid`.
        """
        self.create_run(run_id=run, delivery="store", **config)
        self.submit(run, tasks, n, key="evaluate", sampling=sampling, last=True)
        while (view := self.run(run))["state"] == "open":
            time.sleep(LOOK_S)
        return view

    def _send_groups(self, run: str, bodies: Iterator[Json], last: bool) -> list[Json]:
        """Sends groups in pieces, with `last` in the last one, which may be empty."""
        http, answers = self._http, list[Json]()
        chunk = list(islice(bodies, GROUPS_PER_REQUEST))
        if not chunk and not last:
            raise UserError("no tasks", "at least one", "`last=True` says that no more will come")
        while chunk or last:
            following = list(islice(bodies, GROUPS_PER_REQUEST))
            body = {"groups": chunk, "last": last and not following}
            answer = http.request("POST", "v1", "runs", run, "groups", body=body)
            answers.extend(answer["groups"])
            for note in answer["notes"]:
                self.on_note(note)
            chunk, last = following, last and bool(following)
        return answers

    def run(self, run: str) -> RunSnapshot:
        """State and counters of a run. Raises NotFoundError."""
        return RunSnapshot(self._http.request("GET", "v1", "runs", run))

    def pause(self, run: str) -> RunSnapshot:
        """Start no more groups of a run until `resume`; those that are started end."""
        return RunSnapshot(self._http.request("POST", "v1", "runs", run, "pause", body={}))

    def resume(self, run: str) -> RunSnapshot:
        return RunSnapshot(self._http.request("POST", "v1", "runs", run, "resume", body={}))

    def cancel(self, run: str, group: int | None = None) -> dict[str, Json]:
        """Cancel what is open in a run, or in one group of it; what is stored stays."""
        path = ("v1", "runs", run) if group is None else ("v1", "runs", run, "groups", str(group))
        return dict(self._http.request("DELETE", *path) or {})

    def delete(self, run: str) -> None:
        """Remove an ended run with all that is stored of it; raises ConflictError while needed."""
        self._http.request("DELETE", "v1", "runs", run, "data")

    def publish(
        self,
        run: str,
        version: int,
        path: str | Path,
        *,
        pause: str = "abort",
        expected: Mapping[str, Json] | None = None,
        trained: str = "",
    ) -> dict[str, Json]:
        """Have the backends load the weights in `path` (a Hugging Face directory) as `version`.

        `version` is one above the last, or 0: the service takes the next id, and the reply's
        `version` names it. Waits as long as they load. `pause`: what becomes of calls that run
        (`abort`, `wait` or `keep`). `expected`: `prompt_ids`, and `ids` and `logprobs` of likely
        next tokens by the trainer's own forward pass at temperature 1; a server that samples
        otherwise has not taken the weights. `trained`: the cursor of the last batch that the
        weights were trained on, for a trainer that commits less often than it publishes: a run
        with `max_staleness` samples the next step's groups from then on.
        """
        place = str(Path(path).absolute())
        if not Path(path).is_dir():
            raise UserError(
                f"weights {place!r}: no such directory here", "a Hugging Face directory"
            )
        body: dict[str, Json] = {"version": version, "path": place, "pause": pause}
        if trained:
            body["trained"] = Cursor.parse(trained).seq
        if expected is not None:
            body["expected"] = dict(expected)
        while True:
            reply = dict(self._http.request("POST", "v1", "runs", run, "versions", body=body))
            if not reply.pop("pending", False):
                return reply
            body["version"] = reply["version"]

    def announce(
        self,
        run: str,
        version: int,
        servers: Iterable[str] | Mapping[str, str],
        *,
        expected: Mapping[str, Json] | None = None,
    ) -> dict[str, Json]:
        """Say that these model servers have `version` from the trainer itself; nothing is loaded.

        A server is believed that stood paused (`pause_backends`) since before the weights came, or
        that states the label that `servers` gives for it; `failed` in the answer says who is not,
        and gets no rollouts until it is announced again, as does who is not named. Tokens have the
        version that their server states around the call, else they do not train. `expected`: as in
        `publish`; a paused server is compared when it resumes. Without it the answer's `verified`
        is false. Raises ConflictError when no server is believed.
        """
        labels = dict(servers) if isinstance(servers, Mapping) else dict.fromkeys(servers, "")
        named = [{"backend": name, "label": label} for name, label in labels.items()]
        body: dict[str, Json] = {"version": version, "announce": named}
        if expected is not None:
            body["expected"] = dict(expected)
        return dict(self._http.request("POST", "v1", "runs", run, "versions", body=body))

    def pause_backends(self, names: Iterable[str], *, mode: str = "abort") -> dict[str, Json]:
        """Stop model servers while the trainer gives them weights itself, or lets them sleep. They
        get no rollouts and nobody's budget runs until `resume_backends`. `mode`: what becomes of
        calls that run (`abort`, `wait` or `keep`). The answer's `failed` says who did not stop.
        """
        body = {"names": list(names), "mode": mode}
        return dict(self._http.request("POST", "v1", "backends", "pause", body=body))

    def resume_backends(self, names: Iterable[str]) -> dict[str, Json]:
        """Let them sample again; `failed` says who cannot, or serves what nobody announced."""
        body = {"names": list(names)}
        return dict(self._http.request("POST", "v1", "backends", "resume", body=body))

    def backends(self) -> list[dict[str, Json]]:
        """The pool of model servers, and those that open runs name: state, work, what is wrong."""
        return list(self._http.request("GET", "v1", "backends")["backends"])

    def add_backend(self, name: str) -> None:
        """Put a backend into the pool. Raises UserError with what it is not."""
        self._http.request("POST", "v1", "backends", body={"name": name})

    def remove_backend(self, name: str, *, drain: bool = False) -> None:
        """Take a backend out, or let it finish what it has. Raises NotFoundError."""
        query = {"name": name, "drain": str(drain).lower()}
        self._http.request("DELETE", "v1", "backends", query=query)

    def replace_backends(self, names: Iterable[str]) -> None:
        """Make these the whole pool, at once or not at all. Raises UserError."""
        self._http.request("PUT", "v1", "backends", body={"backends": list(names)})

    def drain(self, node: str, *, deadline_s: float | None = None) -> dict[str, Json]:
        """Have a node take nothing new, end what it has and leave; no rollout is charged. What it
        has not ended after `deadline_s` it gives back. Raises NotFoundError once it has left.
        """
        body = {"deadline_s": deadline_s}
        return dict(self._http.request("POST", "v1", "nodes", node, "drain", body=body))

    def node_settings(self) -> dict[str, Json]:
        """Returns what a node shares with the service; for holders of the join file `node.json`."""
        return dict(self._http.request("GET", "v1", "node"))

    def node_certificate(self, node: str, request: str) -> str:
        """Returns what the service signs for a node's own key; for holders of the join file
        `node.json`.
        """
        answer = self._http.request(
            "POST", "v1", "nodes", node, "certificate", body={"request": request}
        )
        return str(answer["certificate"])

    def status(self) -> dict[str, Json]:
        """Returns what the service, or the replay, says of itself."""
        if self._http_or_none is None:
            return self._flight("").action("status", {})
        return dict(self._http.request("GET", "v1", "status"))

    def stream(
        self,
        run: str,
        consumer: str = "primary",
        cursor: str | None = None,
        *,
        groups_per_batch: int | None = None,
        max_bytes: int = 64 << 20,
        max_groups: int | None = None,
        wait_s: float = 10.0,
        advantages: Advantages = "group",
    ) -> Iterator[PackedBatch]:
        """Kept groups in delivery order until the run's end.

        They begin at `cursor`; None: where this consumer committed last. Without `groups_per_batch`
        batches come as they lie in memory, at least one whole group each; with it each has that
        many groups (one copy where they lay apart), the last one of a run perhaps fewer, and no
        group is handed out before its batch is asked for. `max_bytes` and `max_groups` bound one
        fetch. `advantages`: "group" (GRPO), "centred" (Dr. GRPO), a function, or None. A run that
        does not move is a warning of the logger `prorl.client`, with what it waits for, within half
        a minute. Raises ConflictError for a cursor of another run or ahead of the log, UserError
        for batches that could never fill.
        """
        if groups_per_batch is not None:
            self._check_fills(run, groups_per_batch)
        ticket = Ticket(
            run=run,
            consumer=consumer,
            cursor=cursor or "",
            max_bytes=max_bytes,
            max_groups=max_groups or 0,
            wait_s=min(wait_s, MAX_WAIT_S),
        )
        batches = (
            add_advantages(batch, advantages)
            for batch in self._batches(ticket, groups_per_batch or 0)
        )
        return batches if groups_per_batch is None else regroup(batches, groups_per_batch)

    def stream_shares(
        self, run: str, rank: int, world: int, *, groups_per_step: int, max_tokens: int, **more: Any
    ) -> Iterator[RankShare]:
        """Yields what data rank `rank` of `world` does with each step of `groups_per_step` groups.
        It does it in passes of at most `max_tokens` (`prorl.client.ranks`). `more` is as in
        `stream`; all ranks name the same consumer, and only rank 0 commits.
        """
        check_rank(rank, world, max_tokens)
        steps = self.stream(run, groups_per_batch=groups_per_step, **more)
        return (share(step, rank, world, max_tokens) for step in steps)

    def routed_experts(
        self, batch: PackedBatch, consumer: str = "primary"
    ) -> list[NDArray[Any] | None]:
        """Returns for each sequence of a streamed batch [R, layers * top_k] experts of its first R
        tokens, which are all but the last; None where the run keeps none (`run.routed_experts`). A
        fetch of its own, group by group: about 400 bytes a token of a large model.
        """
        experts: dict[int, NDArray[Any]] = {}
        for seq in batch.arrow.column("delivery_seq").unique().to_pylist():
            ticket = Ticket(
                run=batch.run,
                consumer=consumer,
                cursor=str(Cursor(batch.run, seq)),
                max_groups=1,
                wait_s=0.0,
                layout="routed_experts",
            )
            rows = self._retrying(partial(self._routing, ticket))
            for row in rows.select(["sequence_id", "width", "experts", "wide"]).to_pylist():
                flat = np.frombuffer(row["experts"], "<i2" if row["wide"] else "u1")
                experts[row["sequence_id"]] = flat.reshape(-1, row["width"])
        return [experts.get(key) for key in batch.arrow.column("sequence_id").to_pylist()]

    def _routing(self, ticket: Ticket) -> pa.Table:
        return self._flight(ticket.run).routed_experts(ticket)

    def commit(self, at: PackedBatch | str, consumer: str = "primary") -> None:
        """Everything before this cursor is trained and durable. Call it when the checkpoint that
        holds the cursor is on disk.
        """
        cursor = at if isinstance(at, str) else at.cursor
        body = {"run": Cursor.parse(cursor).run, "consumer": consumer, "cursor": cursor}
        self._retrying(lambda: self._flight(body["run"]).action("commit", body))

    def record(self, run: str, rows: pa.Table) -> bool:
        """Append a checkpoint's lineage (`prorl.schema.TRAINED`) to the run.

        It is there once, however often it is said. Returns False where the run is served from what
        may not be written to, by a replay.

        Raises SchemaError for other columns, UserError for rows of several checkpoints.
        """
        sink = pa.BufferOutputStream()
        metadata = {**(rows.schema.metadata or {}), b"prorl.run": run.encode()}
        rows = rows.replace_schema_metadata(metadata)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
            stream.write_table(rows)
        body = sink.getvalue().to_pybytes()
        return bool(self._retrying(lambda: self._flight(run).action("record", body))["recorded"])

    def log(
        self,
        run: str,
        step: int,
        values: Mapping[str, float],
        *,
        version: int | None = None,
        consumer: str = "primary",
    ) -> bool:
        """Store what the trainer measured in a step, as rows of the run's table `metrics`.

        The viewer draws `loss`, `kl`, `entropy`, `grad_norm` and `idle_share` (the share of the
        step in which the trainer waited for groups) beside the reward, and every other name, too.
        Values that are not finite are left out. A step that is logged again replaces what it had.
        `version`: the policy version that the step made. Returns False where nothing is stored: in
        a replay, or when no value is finite.
        """
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        body: dict[str, Json] = {"run": run, "consumer": consumer, "step": step, "values": finite}
        body |= {"key": uuid.uuid4().hex, "version": version}
        if not finite:
            return False
        return bool(self._retrying(lambda: self._flight(run).action("log", body))["logged"])

    def _check_fills(self, run: str, groups_per_batch: int) -> None:
        """Refuse a batch above the run's bound on uncommitted groups: it would wait for ever.
        Nothing more starts until it is committed.
        """
        if groups_per_batch < 1:
            raise UserError(f"groups_per_batch {groups_per_batch}", "at least 1")
        if self._http_or_none is None:
            return
        config = self.run(run)["config"]
        if config["delivery"] == "stream" and groups_per_batch > config["max_uncommitted_groups"]:
            problem = (
                f"groups_per_batch {groups_per_batch} of run {run!r}, which pauses at"
                f" {pluralize(config['max_uncommitted_groups'], 'uncommitted group')}"
            )
            raise UserError(
                problem, "at most that many", "make the run with a larger max_uncommitted_groups"
            )

    def _batches(self, ticket: Ticket, step: int) -> Iterator[PackedBatch]:
        bound, num_groups, stalled = ticket.max_groups or step, 0, ""
        while True:
            if step:
                ticket = replace(ticket, max_groups=min(bound, step - num_groups % step))
            fetched = self._retrying(partial(self._fetch, ticket))
            for batch in (PackedBatch(arrow, ticket.run) for arrow in fetched.batches):
                num_groups += batch.num_groups
                yield batch
            if fetched.end:
                if stale := self._stale_words(ticket.run):
                    log.warning("run %s %s", ticket.run, stale)
                elif not num_groups and not ticket.cursor:
                    log.warning("run %s %s", ticket.run, _why_nothing(fetched.cursor, ticket))
                return
            if fetched.stalled != stalled:
                stalled = fetched.stalled
                log.warning(
                    "run %s %s", ticket.run, f"has no rows yet: {stalled}" if stalled else "moves"
                )
            ticket = replace(ticket, cursor=fetched.cursor)

    def _stale_words(self, run: str) -> str:
        """Returns how many kept groups of an ended run nobody gets; empty if there are none."""
        if self._http_or_none is None:
            return ""
        with contextlib.suppress(NotFoundError, UnavailableError):
            # Once: a service may leave as soon as its last group is committed.
            snapshot = self._http.request("GET", "v1", "runs", run, retry_s=0.1)
            if num_stale := snapshot["groups"].get("stale", 0):
                groups = pluralize(num_stale, "kept group was", "kept groups were")
                return (
                    f"has ended, and {groups} not handed out: weights were published meanwhile, and"
                    f" max_staleness is {snapshot['config']['max_staleness']}"
                )
        return ""

    def _fetch(self, ticket: Ticket) -> Fetched:
        return self._flight(ticket.run).fetch(ticket)

    def _retrying(self, call: Callable[[], ResultT]) -> ResultT:
        for attempt in stamina.retry_context(
            on=UnavailableError, attempts=None, timeout=RETRY_S, wait_max=WAIT_S
        ):
            with attempt:
                try:
                    return call()
                except UnavailableError:
                    self.close()
                    raise
        raise AssertionError("retry_context either returns or raises")

    @property
    def _http(self) -> Http:
        if self._http_or_none is None:
            raise UserError(
                f"{self._location} is a replay",
                "the service's http:// address for submitting and publishing",
            )
        return self._http_or_none

    def _flight(self, run: str) -> FlightSource:
        """The store, which the service names to whoever may see `run`."""
        if self._source is None:
            location, token = self._location, self._token
            if not location:
                location, token = str(self.run(run)["flight"]), self._http.address.token
            if not location:
                raise UnavailableError(f"{self._http.url}: its store is not there yet")
            self._source = FlightSource(location, token, credentials=self._credentials)
        return self._source


def _task_body(task: Task | Mapping[str, Json], extra: Mapping[str, Json] | None) -> Json:
    """A task as HTTP takes it. Raises TaskError for what orjson would change: NaN is null there."""
    values = asdict(task) if isinstance(task, Task) else dict(task)
    check_values(str(values.get("task_id", "")), values, extra)
    return values


def _why_nothing(end: str, ticket: Ticket) -> str:
    """Returns why a run that has ended gives a consumer no group behind its last commit."""
    if not Cursor.parse(end).seq:
        return "has ended and kept no group; `prorl show` says why groups were dropped"
    again = f"cursor={str(Cursor(ticket.run, 0))!r} reads it again"
    return f"has ended, and {ticket.consumer!r} committed all of it, up to {end}: {again}"
