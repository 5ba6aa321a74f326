"""`RolloutRequests`: single rollouts asked of the service, and answers made of what it stored.

    rollouts = Rollouts(client, root, "nemo-gym")
    answer = await rollouts.complete(task, agent="codex")      # when it is stored

Rollouts that are driven alike (agent, limits) share a run, which is made when the first of them
comes; of the runs that no request needs only the last few stay open. Answers are read from the run
directory, so that nothing of them is held here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import count, groupby
from typing import NamedTuple

import numpy as np
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from numpy.typing import NDArray

from prorl import exact_json
from prorl.client import Client
from prorl.errors import ConflictError, NotFoundError, ProrlError, StorageError, UserError
from prorl.schema.sequences import read_sequences
from prorl.storage.files.layout import RunDir
from prorl.storage.files.part_reader import PartReader
from prorl.storage.files.runs import below
from prorl.storage.read.catalog import StoredRun
from prorl.tasks.formats import Row, detect
from prorl.types import Json, SamplingParams, Sequence, SpanKind, Task

LOOK_S = 0.1
"""Between two looks at what was committed, while somebody waits."""

MAX_IDLE_RUNS = 8
"""Runs that stay open while no request needs them. An open run costs the service about 10 threads
and 5 MiB; a run that is ended costs the next request like it the proof of a chat template.
"""


class SequenceSpan(NamedTuple):
    """A stretch of a sequence that was sampled in one model call, or that was not sampled."""

    start: int
    end: int
    sampled: bool
    messages: list[dict[str, Json]]
    """The messages that the transcript tells; rows of `messages`."""


class FinishedRollout(NamedTuple):
    row: Mapping[str, Json]
    sequences: tuple[Sequence, ...]
    turns: list[dict[str, Json]]
    messages: list[dict[str, Json]]

    @property
    def main(self) -> Sequence | None:
        """Returns the last sequence that trains, for protocols of one sequence a rollout."""
        trained = [sequence for sequence in self.sequences if sequence.weight > 0]
        return max(
            trained or self.sequences[:1], key=lambda sequence: sequence.segment, default=None
        )

    @property
    def failed(self) -> str:
        """Tells why its reward does not count; empty where it does."""
        row = self.row
        return "" if row["valid"] else str(row["failure_message"] or row["failure_code"]) or "void"

    def messages_in(self, sequence: Sequence) -> list[dict[str, Json]]:
        segments = {turn["turn"]: turn["segment"] for turn in self.turns}
        return [
            message
            for message in self.messages
            if message["role"] != "grader"
            and segments.get(message["turn"], sequence.segment) == sequence.segment
        ]

    def pieces(self, sequence: Sequence) -> list[SequenceSpan]:
        """Returns the sequence up to its last sampled token, cut where sampling begins and ends."""
        groups = [
            list(part)
            for _, part in groupby(self.messages_in(sequence), lambda m: m["role"] == "assistant")
        ]
        ends, kinds, turns = (
            values.tolist()
            for values in (sequence.span_end_S, sequence.span_kind_S, sequence.span_turn_S)
        )
        cut, start = list[tuple[int, int, bool]](), 0
        for (kind, _), spans in groupby(
            zip(ends, kinds, turns, strict=True),
            lambda span: (span[1] != SpanKind.CONTEXT, span[2] if span[1] else -1),
        ):
            *_, (end, _, _) = spans
            cut.append((start, end, kind))
            start = end
        while cut and not cut[-1][2]:
            cut.pop()
        aligned = groups if len(groups) >= len(cut) else [[] for _ in cut]
        return [SequenceSpan(*part, messages) for part, messages in zip(cut, aligned, strict=False)]


class RolloutRequests:
    """Belongs to the event loop that uses it. A run is reserved before the first `await`: requests
    that need one meanwhile wait for the same, and requests for another run do not.
    """

    def __init__(self, client: Client, root: str, name: str) -> None:
        """`root`: of the run directories; `name`: how runs begin that are made here."""
        self.client, self._root, self._name = client, root, name
        self._runs: dict[str, _Run] = {}
        """The runs by how their rollouts are driven; the least recently used first."""
        self._background = set[asyncio.Task[None]]()

    async def complete(
        self,
        task: Task,
        *,
        agent: str = "native",
        limits: Mapping[str, Json] | None = None,
        sampling: SamplingParams | None = None,
    ) -> FinishedRollout:
        """Ask for a rollout and wait until it is stored, however it ends; it is cancelled with
        whoever waits. Raises UserError for what the service refuses, UnavailableError.
        """
        config: dict[str, Json] = {"agent": agent, "limits": dict(limits or {})}
        run = self._run_for(config)
        submitting = asyncio.ensure_future(self._submit(run, task, sampling))
        try:
            group = await asyncio.shield(submitting)
            return await run.wait(group["first_rollout_id"])
        except asyncio.CancelledError:
            self._start(self._cancel(run, submitting))
            raise
        except ConflictError:  # somebody ended the run: the next request makes another
            self._forget(run)
            raise
        finally:
            run.users -= 1
            self._end_idle()

    def _run_for(self, config: dict[str, Json]) -> _Run:
        """Returns the run whose rollouts are driven so, with one user more."""
        name = blake2b(
            exact_json.dumps(config, option=orjson.OPT_SORT_KEYS), digest_size=4
        ).hexdigest()
        run = self._runs.pop(name, None)
        if run is None or run.ending is not None:
            before = run.ending if run else None
            opening = asyncio.ensure_future(self._open(f"{self._name}-{name}", config, before))
            run = _Run(name, opening)
            opening.add_done_callback(partial(self._opened, run))
        self._runs[name] = run
        run.users += 1
        return run

    async def _open(
        self, stem: str, config: dict[str, Json], before: asyncio.Task[None] | None
    ) -> tuple[str, str]:
        """Make the run, or go on with one of an earlier incarnation: its name and its directory."""
        if before is not None:
            await before
        for number in count(1):
            run_id = stem if number == 1 else f"{stem}-{number}"
            # its instances come from many jobs: a prompt too long is its own job's end
            make = partial(self.client.create_run, run_id=run_id, skip_invalid=True, **config)
            run = await asyncio.to_thread(make)
            if run["state"] == "open" and not run["last"]:
                return run_id, below(self._root, run_id)
        raise AssertionError

    async def _submit(self, run: _Run, task: Task, sampling: SamplingParams | None) -> Json:
        run_id, _ = await asyncio.shield(run.opening)
        submit = partial(self.client.submit, run_id, [task], 1, sampling=sampling)
        (group,) = await asyncio.to_thread(submit)
        return group

    async def _cancel(self, run: _Run, submitting: asyncio.Future[Json]) -> None:
        with suppress(ProrlError):  # it was never accepted, or the service is away
            group = await submitting
            run_id, _ = run.opening.result()
            await asyncio.to_thread(self.client.cancel, run_id, group["group_id"])

    def _end_idle(self) -> None:
        """End the runs that nobody has used for longest: each open run holds threads and memory of
        the service.
        """
        idle = [run for run in self._runs.values() if not run.users and run.opening.done()]
        for run in idle[: max(0, len(idle) - MAX_IDLE_RUNS)]:
            if run.ending is None:
                run.ending = self._start(self._end(run))

    async def _end(self, run: _Run) -> None:
        with suppress(ProrlError):
            run_id, _ = run.opening.result()
            await asyncio.to_thread(partial(self.client.submit, run_id, [], last=True))
        self._forget(run)

    def _opened(self, run: _Run, opening: asyncio.Future[tuple[str, str]]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._forget(run)  # the next request tries anew

    def _forget(self, run: _Run) -> None:
        if self._runs.get(run.name) is run:
            del self._runs[run.name]

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Run:
    """Follows the commits of a run while somebody waits for one of its rollouts."""

    def __init__(self, name: str, opening: asyncio.Future[tuple[str, str]]) -> None:
        """`opening` becomes the run's name at the service and its directory."""
        self.name, self.opening = name, opening
        self.users = 0
        """Requests that need it."""
        self.ending: asyncio.Task[None] | None = None
        self._upto = 0
        self._below, self._stored = 0, set[int]()
        """Stored are all rollouts below the one, and those: as many as end before an older one."""
        self._run: StoredRun | None = None
        self._waiting: dict[int, asyncio.Future[FinishedRollout]] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def _where(self) -> str:
        return self.opening.result()[1]

    async def wait(self, rollout: int) -> FinishedRollout:
        """A rollout once it is stored."""
        if rollout not in self._waiting:
            self._waiting[rollout] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._waiting[rollout])

    async def _look(self) -> None:
        while self._waiting:
            for rollout, answer in await asyncio.to_thread(
                self._stored_answers, list(self._waiting)
            ):
                self._waiting.pop(rollout).set_result(answer)
            await asyncio.sleep(LOOK_S)

    def _stored_answers(self, rollout_ids: list[int]) -> list[tuple[int, FinishedRollout]]:
        try:
            self._refresh()
            return [
                (rollout_id, self._answer(rollout_id))
                for rollout_id in rollout_ids
                if self._is_stored(rollout_id)
            ]
        except (NotFoundError, StorageError, FileNotFoundError):
            return []  # not written yet, or compacted this moment: looked at again

    def _refresh(self) -> None:
        directory = RunDir(self._where)
        names = [name for name in directory.commit_names() if name.last > self._upto]
        if not names:
            return
        self._run = StoredRun(self._where)
        for commit in directory.read_commits(names):
            for file in commit.files:
                if file.table == "rollouts" and file.rows:
                    with PartReader(directory, file) as part:
                        ids = part.read(columns=["rollout_id"]).column("rollout_id")
                    self._stored.update(ids.to_pylist())
        while self._below in self._stored:
            self._stored.remove(self._below)
            self._below += 1
        self._upto = names[-1].last

    def _is_stored(self, rollout: int) -> bool:
        return rollout < self._below or rollout in self._stored

    def _answer(self, rollout: int) -> FinishedRollout:
        assert self._run is not None
        tables = self._run.rollout(rollout)
        sequences = tables["sequences"].combine_chunks().to_struct_array()
        chunks = (read_sequences(chunk) for chunk in sequences.chunks)
        return FinishedRollout(
            row=tables["rollouts"].to_pylist()[0],
            sequences=tuple(sequence for chunk in chunks for sequence in chunk),
            turns=tables["turns"].to_pylist(),
            messages=tables["messages"].to_pylist(),
        )


def task_of(row: Row) -> Task:
    """A task of a row of any format that `prorl run --tasks` reads. Raises TaskError."""
    return detect(row).read(row, 0)


def sampling_of(request: Mapping[str, Json], max_tokens: str) -> SamplingParams | None:
    """Returns a request's sampling parameters, if it has any. `max_tokens`: its name for that."""
    named = {"temperature": "temperature", "top_p": "top_p", max_tokens: "max_tokens"}
    settings = {ours: request[key] for key, ours in named.items() if request.get(key) is not None}
    return SamplingParams(**settings) if settings else None


def logprobs_of(sequence: Sequence) -> NDArray[np.float32]:
    """One a token: 0 where none was sampled."""
    widths = np.diff(sequence.span_end_S, prepend=0)
    values = np.zeros(len(sequence.token_ids_L), np.float32)
    values[np.repeat(sequence.span_kind_S, widths) != SpanKind.CONTEXT] = sequence.logprobs_C
    return values


def calls_of(message: Mapping[str, Json]) -> list[dict[str, Json]]:
    """The tool calls of a message, each with an id."""
    calls = exact_json.loads(message["tool_calls"] or b"[]")
    turn = message["turn"]
    return [{**call, "id": call["id"] or f"call_{turn}_{i}"} for i, call in enumerate(calls)]


def answered(body: Json, status: int = 200) -> web.Response:
    """JSON, arrays of numpy too."""
    data = exact_json.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
    return web.Response(body=data, status=status, content_type="application/json")


async def body_of(
    request: web.Request, needs: Mapping[str, type], may: Mapping[str, type] | None = None
) -> dict[str, Json]:
    """The JSON object of a request that has the keys of `needs`, and perhaps those of `may`, with
    values of these types; an optional key may be null. Raises UserError.
    """
    try:
        body = exact_json.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is no JSON: {error}", "a JSON object") from None
    if not isinstance(body, dict) or (lacking := [key for key in needs if key not in body]):
        problem = f"no {', '.join(lacking)}" if isinstance(body, dict) else type(body).__name__
        raise UserError(f"a body with {problem}", f"an object with {', '.join(needs)}")
    optional = {key: kind for key, kind in (may or {}).items() if body.get(key) is not None}
    for key, kind in {**needs, **optional}.items():
        if not isinstance(body[key], kind):
            raise UserError(f"`{key}` is {str(body[key])[:100]!r}", f"`{key}`: {_JSON_NAMES[kind]}")
    return body


_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Returns what goes wrong, as FastAPI says it, which all of these servers are made with."""
    try:
        response = await handler(request)
    except ConflictError as error:
        return answered({"detail": str(error)}, 409)
    except UserError as error:
        return answered({"detail": str(error)}, 422)
    except ProrlError as error:
        return answered({"detail": str(error)}, 503)
    except web.HTTPException as error:
        return answered({"detail": error.text}, error.status)
    return response
