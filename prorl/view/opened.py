"""A run as the viewer holds it: narrow columns of `rollouts` in memory, the rest read when asked.

100,000 rollouts are about 40 MB. Filters and orders are SQL in the cage (`LockedDuckDB`) and leave
row numbers, so that a page of rows is a slice wherever it lies. A run that is written right now is
followed by its commits: only new parts are read. A part that cannot be read is named in `damaged`
and the others are shown. An answer to SQL of a page is kept beside the files that it was made of,
and counts while the run consists of the same ones. Every public method takes the lock, so that
threads may call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.curves import AXES, curves
from prorl.analysis.provenance import provenance
from prorl.errors import NotFoundError, ProrlError, StorageError, UnavailableError, UserError
from prorl.schema import ARROW_ERRORS, TABLES
from prorl.storage.files.part_reader import dataset
from prorl.storage.read.catalog import DERIVED, OF_ROLLOUTS, VIEWS, Sources, StoredRun, sources_of
from prorl.storage.read.sql import LockedDuckDB
from prorl.types import Json

SQL_S = 5.0
"""For SQL that a person wrote; longer questions are for `prorl sql`."""

PAGE_S = 120.0
"""For SQL of a page, which ends unless the machine has no time for it."""

ANSWERS, ANSWER_BYTES = 64, 8 << 20
"""Answers that are kept: all figures of a run, and filters, of 8 bytes a row."""

NARROW = pa.schema([f for f in TABLES["rollouts"] if f.name != "artifact"])
"""The columns that are held of each rollout."""

FACETS = (
    *("status", "failure_code", "stop_reason", "reward", "min_version", "data_source"),
    *("env", "agent", "num_turns", "num_tool_calls"),
)
"""Columns with few values."""

LIVE = """
select count(*) as rollouts, avg(reward) filter (valid) as reward,
    count(*) filter (failure_class in ('infra', 'task')) as failed,
    max(max_version) as last_version, max(committed_at) as last_at
from rollouts"""
TOTALS = """
select count(*) as rollouts, count(distinct group_id) as groups,
    count(distinct task_id) as tasks, count(*) filter (valid) as valid,
    count(*) filter (failure_class in ('infra', 'task')) as failed,
    count(*) filter (not valid and failure_class not in ('infra', 'task')) as masked,
    count(*) filter (failure_code <> '') as failures,
    avg(reward) filter (valid) as reward, count(*) filter (valid and reward > 0) as rewarded,
    (select stddev_samp(mean) / sqrt(count(*)) from (
        select avg(reward) as mean from rollouts where valid group by task_id)
        where isfinite(mean)) as reward_error,
    coalesce(sum(num_tokens), 0)::bigint as tokens,
    coalesce(sum(num_sampled), 0)::bigint as sampled,
    coalesce(sum(num_trained), 0)::bigint as trained,
    coalesce(sum(continued_calls), 0)::bigint as continued_calls,
    coalesce(sum(rendered_calls), 0)::bigint as rendered_calls,
    coalesce(sum(forked_calls), 0)::bigint as forked_calls,
    coalesce(sum(retokenization_mismatches), 0)::bigint as retokenization_mismatches,
    coalesce(sum(num_turns), 0)::bigint as calls,
    min(min_version) filter (min_version >= 0) as first_version, max(max_version) as last_version,
    avg(max_version - min_version) filter (min_version >= 0) as staleness,
    date_diff('millisecond', min(committed_at), max(committed_at)) / 1000 as seconds,
    max(committed_at) as last_at
from rollouts"""
SPARK = """
select avg(reward) as reward from (
    select reward, ntile(24) over (order by committed_at, rollout_id) as part
    from rollouts where valid)
group by part order by part"""

PLACE, CHOSEN = "row_number_here", "chosen_here"

MOST_WORDS = 8
HAS_WORD = """(contains(lower(task_id), {word}) or contains(lower(failure_message), {word})
    or coalesce(word_{place}, false))"""
WORDED = """(select * from rollouts left join (
    select rollout_id as worded, {any_word} from (select rollout_id, {words} from messages)
    where {has_word} group by rollout_id)
    on worded = rollout_id) as rollouts"""
"""One look at all messages, for however many words."""

SNIPPET_CHARS = 400
"""The part of what was asked and answered that a row of the list shows."""
SPOKEN = f"""
select rollout_id,
    left(arg_min(content, "index") filter (role = 'user'), {SNIPPET_CHARS}) as asked,
    left(arg_max(content, "index") filter (role = 'assistant' and content <> ''), {SNIPPET_CHARS})
    as answered
from messages where rollout_id in ({{}}) group by rollout_id"""
PROMPTS = "select group_id, task from tasks where group_id in ({})"


class Question(NamedTuple):
    where: str = ""
    order: str = "rollout_id"
    down: bool = False
    words: str = ""
    """Each of them is in the task's name, a message, or what a failure says, in any case."""

    @property
    def quoted_words(self) -> list[str]:
        words = self.words.lower().split()[:MOST_WORDS]
        return ["'" + word.replace("'", "''") + "'" for word in words]

    @property
    def source(self) -> str:
        """Returns the relation that `condition` applies to."""
        words = self.quoted_words
        names = [f"word_{place}" for place in range(len(words))]
        pairs = zip(words, names, strict=True)
        columns = [f"contains(lower(content), {word}) as {name}" for word, name in pairs]
        if not words:
            return "rollouts"
        return WORDED.format(
            words=", ".join(columns),
            any_word=", ".join(f"bool_or({name}) as {name}" for name in names),
            has_word=" or ".join(names),
        )

    @property
    def condition(self) -> str:
        """Returns the filter as SQL; a comment in it cannot swallow what follows it."""
        parts = [f"(\n{self.where}\n)"] if self.where.strip() else []
        parts += [
            HAS_WORD.format(word=word, place=place) for place, word in enumerate(self.quoted_words)
        ]
        return " and ".join(parts)

    def select(self, columns: str) -> str:
        condition = self.condition
        return f"select {columns} from {self.source}" + (f" where {condition}" if condition else "")


class KeptAnswer(NamedTuple):
    sources: tuple[Sources, ...]
    table: pa.Table


class Opened:
    """One stored run, held open until the viewer needs the room."""

    def __init__(self, where: str) -> None:
        """Raises what StoredRun raises."""
        self._lock = threading.RLock()
        self.stored = StoredRun(where)
        self.damaged: dict[str, str] = {}
        self._forget()
        self._registered: dict[str, Sources] = {}
        self._answers: OrderedDict[tuple[str, int], KeptAnswer] = OrderedDict()
        self._database = LockedDuckDB(threads=2, memory="256MB")
        for name, empty in VIEWS.items():
            self._database.register(name, empty.empty_table())
        for name, derived in DERIVED.items():
            self._database.view(name, derived.sql)
        self._read()

    def refresh(self) -> bool:
        """Read what was committed since; whether anything was."""
        with self._lock:
            manifest = self.stored.manifest
            self.stored.refresh()
            if self.stored.manifest is not manifest:  # another run has the name now
                self._forget()
                self._answers.clear()
                self._registered.clear()
            elif self.stored.commits == self._commits:
                return False
            self._read()
            return True

    def _forget(self) -> None:
        self.rows, self._read_paths = NARROW.empty_table(), set[str]()

    def _read(self) -> None:
        self._commits = self.stored.commits
        paths = [file.path for file in self.stored.files("rollouts")]
        if not self._read_paths.issubset(paths):  # it was compacted
            self._forget()
        self.damaged.clear()
        new = self._narrow([path for path in paths if path not in self._read_paths])
        self.rows = pa.concat_tables([self.rows, *new])
        place = pa.array(np.arange(self.rows.num_rows))
        self._database.register("rollouts", self.rows.append_column(PLACE, place))

    def _narrow(self, paths: Sequence[str]) -> list[pa.Table]:
        """Reads the narrow columns of parts at once, or of each alone where one cannot be read."""
        try:
            table = dataset(self.stored.directory, paths, NARROW).to_table()
        except ARROW_ERRORS as error:
            if len(paths) > 1:
                return [table for path in paths for table in self._narrow([path])]
            self.damaged[paths[0]] = f"{paths[0]}: {error}"
            return []
        self._read_paths.update(paths)
        return [table]

    def about(self) -> dict[str, Json]:
        with self._lock:
            manifest, commits = self.stored.manifest, self.stored.commits
            backends = dict(manifest.get("backends") or {}).values()
            return {
                "run": self.stored.run_id,
                "where": self.stored.directory.where,
                "created_at": manifest.get("created_at"),
                "commits": len(commits),
                "bytes": sum(file.bytes for commit in commits for file in commit.files),
                "policy": sorted({str(backend.get("policy", "")) for backend in backends}),
                "totals": self.answer(TOTALS)[0],
                "columns": [{"name": f.name, "type": str(f.type)} for f in NARROW],
                "figures": [
                    {
                        "name": name,
                        "title": analysis.title,
                        "part": analysis.part,
                        "picture": analysis.picture,
                    }
                    for name, analysis in ANALYSES.items()
                ],
                "damaged": dict(self.damaged),
            }

    def spark(self) -> list[Json]:
        """Returns the mean reward of each twenty-fourth of the run's scored rollouts."""
        return [row["reward"] for row in self.answer(SPARK)]

    def provenance(self) -> dict[str, str]:
        return provenance(self.stored, self.answer)

    def ask(self, sql: str, rows: int = 0) -> list[dict[str, Json]]:
        """The answer to one SELECT of a person. Raises UserError, StorageError."""
        with self._lock:
            return list(self._query(sql, rows, by_user=True).to_pylist())

    def answer(self, sql: str, rows: int = 0) -> list[dict[str, Json]]:
        """The answer to one SELECT of a page. Raises StorageError, UnavailableError."""
        with self._lock:
            return list(self._kept(sql, rows).to_pylist())

    def _kept(self, sql: str, rows: int = 0, *, by_user: bool = False) -> pa.Table:
        """Returns an earlier answer while the run is of the files that it was made of."""
        names = sorted(sources_of(sql) & VIEWS.keys())
        sources = tuple(self.stored.sources(name) for name in names)
        kept = self._answers.pop((sql, rows), None)
        if kept is None or kept.sources != sources:
            kept = KeptAnswer(sources, self._query(sql, rows, by_user=by_user))
        self._answers[sql, rows] = kept
        while len(self._answers) > ANSWERS or self._kept_bytes() > ANSWER_BYTES:
            self._answers.popitem(last=False)
        return kept.table

    def _kept_bytes(self) -> int:
        return sum(answer.table.nbytes for answer in self._answers.values())

    def _query(self, sql: str, rows: int = 0, *, by_user: bool) -> pa.Table:
        for name in (sources_of(sql) & VIEWS.keys()) - {"rollouts"}:
            sources = self.stored.sources(name)
            if self._registered.get(name) != sources:
                self._database.register(name, self.stored.view(name))
                self._registered[name] = sources
        limit_s = SQL_S if by_user else PAGE_S
        late = (
            None
            if by_user
            else UnavailableError(
                f"this part of the page was not ready after {limit_s:g} s: the machine is busy"
            )
        )
        try:
            return self._database.query(sql, limit_s, rows=rows, late=late)
        except StorageError as error:
            raise self.stored.blame(error) from None

    def page(self, question: Question, offset: int, limit: int) -> dict[str, Json]:
        with self._lock:
            places = self._places(question)
            rows = self.rows.take(pa.array(places[offset : offset + limit])).to_pylist()
            self._add_spoken(rows)
            return {"total": len(places), "of": self.rows.num_rows, "rows": rows}

    def _add_spoken(self, rows: list[dict[str, Json]]) -> None:
        """Adds question, answer and expected answer to rows; without messages, the prompt of the
        task. A damaged part leaves them empty: the rows themselves are whole.
        """
        ids = ",".join(str(row["rollout_id"]) for row in rows) or "-1"
        groups = ",".join({str(row["group_id"]) for row in rows}) or "-1"
        spoken, tasks = {}, {}
        with suppress(StorageError):
            spoken = {row["rollout_id"]: row for row in self.answer(SPOKEN.format(ids))}
        with suppress(StorageError):
            answer = self.answer(PROMPTS.format(groups))
            tasks = {row["group_id"]: _task_of(row["task"]) for row in answer}
        for row in rows:
            texts = spoken.get(row["rollout_id"], {})
            task = tasks.get(row["group_id"], {})
            row["asked"] = texts.get("asked") or _prompt(task)
            row["answered"] = texts.get("answered") or ""
            row["expected"] = _expected(task)

    def _places(self, question: Question) -> NDArray[np.int64]:
        if question.order not in NARROW.names:
            raise UserError(f"order by {question.order!r}", f"one of {', '.join(NARROW.names)}")
        order = f' order by "{question.order}" {"desc" if question.down else "asc"} nulls last'
        sql = question.select(PLACE) + f"{order}, rollout_id"
        table = self._kept(sql, by_user=bool(question.where.strip()))
        places: NDArray[np.int64] = table.column(0).to_numpy()
        return places

    def facets(self, question: Question) -> list[dict[str, Json]]:
        counts = " union all ".join(
            f"select {place} as place, '{name}' as name, {name}::varchar as value,"
            " count(*) filter (chosen) as n, count(*) as of,"
            " avg(reward) filter (chosen and valid) as reward from asked group by 3"
            for place, name in enumerate(FACETS)
        )
        with self._lock:
            self._database.register(CHOSEN, pa.table({PLACE: self._places(question)}))
            table = self._query(
                f"with asked as (select *, {PLACE} in (from {CHOSEN}) as chosen from rollouts),"
                f" counts as ({counts})"
                " select * exclude place from counts where n > 0 order by place, n desc, value",
                by_user=False,
            )
            return list(table.to_pylist())

    def neighbours(self, question: Question, rollout_id: int) -> dict[str, Json]:
        with self._lock:
            ids = self.rows.column("rollout_id").take(pa.array(self._places(question)))
            at = pc.index(ids, rollout_id).as_py()
            inside = at is not None and at >= 0
            before = ids[at - 1].as_py() if inside and at > 0 else None
            after = ids[at + 1].as_py() if inside and at + 1 < len(ids) else None
            return {"at": at if inside else None, "of": len(ids), "before": before, "after": after}

    def curves(self, axis: str) -> dict[str, Json]:
        """Raises UserError for no axis of `AXES`."""
        if axis not in AXES:
            raise UserError(f"axis {axis[:100]!r}", f"one of {', '.join(AXES)}")
        return {
            "run": self.stored.run_id,
            "axis": AXES[axis].title,
            "curves": curves(axis, self.answer),
        }

    def figure(self, name: str) -> dict[str, Json]:
        with self._lock:
            analysis = ANALYSES[name]
            about = {"name": name, "title": analysis.title, "sql": analysis.sql.strip()}
            about |= {
                "picture": analysis.picture,
                "where": analysis.where,
                "axis": analysis.axis,
            }
            try:
                return about | {"rows": self.answer(analysis.sql, rows=2000)}
            except ProrlError as error:
                return about | {"rows": [], "error": str(error)}

    def rollout(self, rollout_id: int) -> dict[str, Json]:
        """Returns everything of one rollout but its tokens; parts that cannot be read are named.
        Raises NotFoundError.
        """
        tables, damaged = self.tables(rollout_id, ("rollouts", "messages", "turns"))
        rows = tables["rollouts"].to_pylist()
        if not rows and not damaged:
            raise NotFoundError(f"run {self.stored.run_id} has no rollout {rollout_id}")
        row = rows[0] if rows else {"rollout_id": rollout_id}
        artifact = row.pop("artifact", b"") or b""
        group = row.get("group_id", -1)
        siblings = Question(f"group_id = {group}").select(
            "rollout_id, sample_index, reward, valid, status, failure_class, stop_reason,"
            " num_sampled"
        )
        queries: Mapping[str, str] = {
            "siblings": f"{siblings} order by sample_index",
            "task": f"select * from tasks where group_id = {group} limit 1",
            "annotations": f"select * from annotations where rollout_id = {rollout_id}"
            " order by created_at",
            "trained": f"select * exclude (learner_logprobs, run_id) from trained where"
            f" rollout_id = {rollout_id} order by step",
            "scores": f"select * from scores where rollout_id = {rollout_id}",
        }
        answer: dict[str, Any] = {}
        for name, sql in queries.items():
            try:
                answer[name] = self.answer(sql, rows=500)
            except ProrlError as error:
                answer[name], damaged[name] = [], str(error)
        try:
            answer["attempts"] = self.stored.attempts(rollout_id)
        except ProrlError as error:
            answer["attempts"], damaged["attempts"] = [], str(error)
        return answer | {
            "run": self.stored.run_id,
            "rollout": row,
            "artifact": bytes(artifact).decode("utf-8", "replace"),
            "expected": _expected(_task_of(answer["task"][0]["task"])) if answer["task"] else "",
            "messages": tables["messages"].sort_by("index").to_pylist(),
            "turns": tables["turns"].sort_by("turn").to_pylist(),
            "damaged": damaged,
        }

    def tables(
        self, rollout_id: int, names: tuple[str, ...] = OF_ROLLOUTS
    ) -> tuple[dict[str, pa.Table], dict[str, str]]:
        """Returns one rollout's rows of these tables, and what is wrong with the others."""
        by_table, damaged = {}, {}
        for name in names:
            try:
                by_table[name] = self.stored.rows_of(name, rollout_id)
            except ProrlError as error:
                by_table[name] = TABLES[name].empty_table()
                damaged[name] = str(self.stored.blame(error, [name]))
        return by_table, damaged


def _task_of(text: str) -> dict[str, Json]:
    """Returns a task as `tasks` has it; empty for a text that is none, in a run of somebody else.

    >>> _task_of('{"prompt": "x"}'), _task_of("[1]"), _task_of("no JSON")
    ({'prompt': 'x'}, {}, {})
    """
    try:
        task = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return task if isinstance(task, dict) else {}


def _prompt(task: dict[str, Json]) -> str:
    """Returns the prompt of a task as `tasks` has it: a text, or its last message."""
    prompt = task.get("prompt") or ""
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else None
        prompt = last.get("content") if isinstance(last, dict) else ""
    return str(prompt)[:SNIPPET_CHARS]


def _expected(task: dict[str, Json]) -> str:
    """Returns the reference answer of a task whose data have a short one."""
    data = task.get("data")
    answer = data.get("answer") if isinstance(data, dict) else None
    return str(answer)[:SNIPPET_CHARS] if isinstance(answer, str | int | float) else ""
