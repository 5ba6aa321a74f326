"""A viewer that serves stored runs for the length of a block, and runs worth a look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import aiohttp
import numpy as np
import orjson
import pyarrow as pa

from prorl.analysis.synthetic_runs import make_run, rollout_tables, write_commit
from prorl.schema import TABLES
from prorl.storage.files.layout import RunDir
from prorl.types import Json
from prorl.view.server import Library, listen

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Viewer:
    """The address at which a viewer listens."""

    url: str

    @property
    def address(self) -> str:
        """Without the token."""
        return self.url.partition("#")[0]

    async def ask(
        self, path: str, headers: Mapping[str, str] = NO_HEADERS, *, body: bytes | None = None
    ) -> tuple[int, Json]:
        """Status and JSON of an answer; a header that is given replaces ours."""
        token = self.url.partition("#token=")[2]
        sent = {"Authorization": f"Bearer {token}", **headers}
        method = "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.address + path, data=body, headers=sent) as answer,
        ):
            return answer.status, await answer.json()

    @asynccontextmanager
    async def events(self, path: str) -> AsyncIterator[AsyncIterator[Json]]:
        """Yields the events of a stream, one after the other."""
        sent = {"Authorization": f"Bearer {self.url.partition('#token=')[2]}"}
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.address + path, headers=sent) as answer,
        ):
            yield (orjson.loads(line[6:]) async for line in answer.content if line.strip())


@contextmanager
def viewing(where: str | Path) -> Iterator[Viewer]:
    """The real server on a port of its own, in a thread."""
    listening = listen(Library.at(str(where)), 0, "tester")
    thread = threading.Thread(target=lambda: asyncio.run(listening.serve()))
    thread.start()
    try:
        yield Viewer(listening.url)
    finally:
        listening.server.should_exit = True
        thread.join()


def run_that_says(where: Path, texts: Sequence[str], tokens: int = 64) -> RunDir:
    """A run of one rollout for each text, in which everybody says it and a task is called so."""
    run = make_run(where, 0, 0)
    ids = np.arange(len(texts))
    tables = rollout_tables(ids, tokens, np.random.default_rng(0))
    messages = tables["messages"]
    each = messages.num_rows // len(texts)
    everywhere = pa.array([text for text in texts for _ in range(each)])
    for name in ("content", "reasoning", "name"):
        tables["messages"] = with_column(tables["messages"], "messages", name, everywhere)
    for name in ("task_id", "failure_message"):
        tables["rollouts"] = with_column(
            tables["rollouts"], "rollouts", name, pa.array(list(texts))
        )
    write_commit(run, run.name, 1, tables)
    return run


def with_column(rows: pa.Table, table: str, name: str, values: pa.Array) -> pa.Table:
    place = TABLES[table].names.index(name)
    return rows.set_column(place, TABLES[table].field(name), values)
