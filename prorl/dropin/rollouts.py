"""`Rollouts`: single groups asked of the service, and answers made of what it stored.

    rollouts = Rollouts(client, root, "nemo-gym")
    asked = await rollouts.ask(task, 4, agent="codex")
    answer = await rollouts.answer(asked, 0)      # when the first member is stored

Groups that are driven alike (agent, limits) share a run, which is made when the first of them comes
and stays open. Answers are read from the run directory, so that nothing of them is held here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from prorl import exact_json
from prorl.client import Client
from prorl.errors import ConflictError, NotFoundError, ProrlError, StorageError, UserError
from prorl.schema.sequences import read_sequences
from prorl.storage.files.layout import RunDir
from prorl.storage.files.part_reader import PartReader
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.runs import below
from prorl.tasks.formats import Row, detect
from prorl.types import Json, SamplingParams, Sequence, SpanKind, Task

LOOK_S = 0.1
"""Between two looks at what was committed, while somebody waits."""


class Asked(NamedTuple):
    run: str
    group: int
    rollouts: range


class Piece(NamedTuple):
    """A stretch of a sequence that was sampled in one model call, or that was not sampled."""

    start: int
    end: int
    sampled: bool
    messages: list[dict[str, Json]]
    """What it says, where the transcript tells; rows of `messages`."""


class Answer(NamedTuple):
    row: Mapping[str, Json]
    sequences: tuple[Sequence, ...]
    turns: list[dict[str, Json]]
    messages: list[dict[str, Json]]

    @property
    def main(self) -> Sequence | None:
        """What a protocol of one sequence a rollout is given: the last that trains."""
        trained = [one for one in self.sequences if one.weight > 0]
        return max(trained or self.sequences[:1], key=lambda one: one.segment, default=None)

    @property
    def failed(self) -> str:
        """Why its reward does not count; empty where it does."""
        row = self.row
        return "" if row["valid"] else str(row["failure_message"] or row["failure_code"]) or "void"

    def said_in(self, sequence: Sequence) -> list[dict[str, Json]]:
        segments = {turn["turn"]: turn["segment"] for turn in self.turns}
        return [
            message
            for message in self.messages
            if message["role"] != "grader"
            and segments.get(message["turn"], sequence.segment) == sequence.segment
        ]

    def pieces(self, sequence: Sequence) -> list[Piece]:
        """The sequence up to its last sampled token, cut where sampling begins and ends."""
        said = [
            list(part)
            for _, part in groupby(self.said_in(sequence), lambda m: m["role"] == "assistant")
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
        told = said if len(said) >= len(cut) else [[] for _ in cut]
        return [Piece(*part, messages) for part, messages in zip(cut, told, strict=False)]


class Rollouts:
    """Belongs to the event loop that uses it."""

    def __init__(self, client: Client, root: str, name: str) -> None:
        """`root`: of the run directories; `name`: how runs begin that are made here."""
        self.client, self._root, self._name = client, root, name
        self._runs: dict[str, _Run] = {}
        self._making = asyncio.Lock()
        """Of a run, which proves its chat template: once, whoever else comes meanwhile."""
        self._leaving = set[asyncio.Task[None]]()

    async def ask(
        self,
        task: Task,
        n: int = 1,
        *,
        agent: str = "native",
        limits: Mapping[str, Json] | None = None,
        sampling: SamplingParams | None = None,
    ) -> Asked:
        """Submit a group. Raises UserError for what the service refuses, UnavailableError."""
        config: dict[str, Json] = {"agent": agent, "limits": dict(limits or {})}
        told = orjson.dumps(config, option=orjson.OPT_SORT_KEYS)
        run = f"{self._name}-{blake2b(told, digest_size=4).hexdigest()}"
        async with self._making:
            if run not in self._runs:
                await asyncio.to_thread(partial(self.client.create_run, run_id=run, **config))
                self._runs[run] = _Run(below(self._root, run))
        submit = partial(self.client.submit, run, [task], n, sampling=sampling)
        (group,) = await asyncio.to_thread(submit)
        first = group["first_rollout_id"]
        return Asked(run, group["group_id"], range(first, first + n))

    async def answer(self, asked: Asked, index: int) -> Answer:
        """A member once it is stored, however it ended."""
        return await self._runs[asked.run].wait(asked.rollouts[index])

    async def cancel(self, asked: Asked) -> None:
        """Cancel what of a group has not ended: it is stored as cancelled."""
        await asyncio.to_thread(self.client.cancel, asked.run, asked.group)

    async def one(self, task: Task, **how: Any) -> Answer:
        """Ask for a single rollout and wait for it; it is cancelled with whoever waits."""
        asking = asyncio.ensure_future(self.ask(task, **how))
        try:
            return await self.answer(await asyncio.shield(asking), 0)
        except asyncio.CancelledError:
            leaving = asyncio.ensure_future(self._leave(asking))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise

    async def _leave(self, asking: asyncio.Future[Asked]) -> None:
        try:
            await self.cancel(await asking)
        except ProrlError:
            return  # it was never accepted, or the service is gone


class _Run:
    """Follows the commits of a run while somebody waits for one of its rollouts."""

    def __init__(self, where: str) -> None:
        self._where, self._upto = where, 0
        self._below, self._stored = 0, set[int]()
        """Stored are all rollouts below the one, and those: as many as end before an older one."""
        self._run: StoredRun | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, rollout: int) -> Answer:
        if rollout not in self._waiting:
            self._waiting[rollout] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._waiting[rollout])

    async def _look(self) -> None:
        while self._waiting:
            for rollout, answer in await asyncio.to_thread(self._found, list(self._waiting)):
                self._waiting.pop(rollout).set_result(answer)
            await asyncio.sleep(LOOK_S)

    def _found(self, wanted: list[int]) -> list[tuple[int, Answer]]:
        try:
            self._refresh()
            return [(one, self._answer(one)) for one in wanted if self._is_stored(one)]
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

    def _answer(self, rollout: int) -> Answer:
        assert self._run is not None
        found = self._run.rollout(rollout)
        sequences = found["sequences"].combine_chunks().to_struct_array()
        chunks = (read_sequences(chunk) for chunk in sequences.chunks)
        return Answer(
            row=found["rollouts"].to_pylist()[0],
            sequences=tuple(one for chunk in chunks for one in chunk),
            turns=found["turns"].to_pylist(),
            messages=found["messages"].to_pylist(),
        )


def task_of(row: Row) -> Task:
    """A task of a row of any format that `prorl run --tasks` reads. Raises TaskError."""
    return detect(row).read(row, 0)


def sampling_of(asked: Mapping[str, Json], max_tokens: str) -> SamplingParams | None:
    """How a request wants to sample, if it says so. `max_tokens`: its name for that."""
    named = {"temperature": "temperature", "top_p": "top_p", max_tokens: "max_tokens"}
    given = {ours: asked[key] for key, ours in named.items() if asked.get(key) is not None}
    return SamplingParams(**given) if given else None


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


async def body_of(request: web.Request, *needs: str) -> dict[str, Json]:
    """The JSON object of a request that has these keys. Raises UserError."""
    try:
        body = exact_json.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is no JSON: {error}", "a JSON object") from None
    if not isinstance(body, dict) or (lacking := [key for key in needs if key not in body]):
        what = f"no {', '.join(lacking)}" if isinstance(body, dict) else type(body).__name__
        raise UserError(f"a body with {what}", f"an object with {', '.join(needs)}")
    return body


@web.middleware
async def refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    """What goes wrong, as FastAPI says it, which all of these servers are made with."""
    try:
        response: web.StreamResponse = await handler(request)
    except ConflictError as error:
        return answered({"detail": str(error)}, 409)
    except UserError as error:
        return answered({"detail": str(error)}, 422)
    except ProrlError as error:
        return answered({"detail": str(error)}, 503)
    except web.HTTPException as error:
        return answered({"detail": error.text}, error.status)
    return response
