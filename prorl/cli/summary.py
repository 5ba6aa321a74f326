"""Summarises a run from its Parquet files by SQL, never from its writers' counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prorl.cli.output import answer, clean, shortened
from prorl.cli.runs import root_option
from prorl.pluralize import pluralize
from prorl.types import Json

TOTALS = """
select count(*) as rollouts, count(distinct rollout_id) as distinct_rollouts,
    count(distinct group_id) as groups,
    count(*) filter (valid) as valid, count(*) filter (valid and reward > 0) as rewarded,
    avg(reward) filter (valid) as mean_reward,
    coalesce(sum(num_turns), 0)::bigint as model_calls,
    coalesce(sum(num_tool_calls), 0)::bigint as tool_calls,
    coalesce(sum(num_tokens), 0)::bigint as tokens,
    coalesce(sum(num_sampled), 0)::bigint as sampled_tokens,
    coalesce(sum(continued_calls), 0)::bigint as continued_calls,
    coalesce(sum(rendered_calls), 0)::bigint as rendered_calls,
    coalesce(sum(forked_calls), 0)::bigint as forked_calls,
    coalesce(sum(retokenization_mismatches), 0)::bigint as retokenization_mismatches,
    coalesce(sum(edited_replies), 0)::bigint as edited_replies,
    coalesce(sum(unused_replies), 0)::bigint as unused_replies,
    coalesce(sum(image_placeholders), 0)::bigint as image_placeholders,
    max(attempt) as max_attempt,
    count(*) filter (stop_reason in ('max_tokens', 'context')) as cut_by_tokens,
    count(*) filter (stop_reason = 'deadline') as cut_by_time
from rollouts
"""

FAILED_SQL = "select failure_code, count(*) from rollouts group by all"
BY_TASK_SQL = "select task_id, avg(reward) from rollouts group by all order by 2 limit 9"
"""The query that a person may run next."""

STATES = "select status, count(*) as n from rollouts group by status order by status"

FAILURES = """
select failure_class, failure_code, count(*) as n, min(failure_message) as example
from rollouts where failure_code <> '' and failure_class <> 'cancelled'
group by all order by n desc, failure_code
"""

RETRIED = """
select a.failure_class, a.failure_code, count(*) as n, min(rollout_id) as first_rollout
from attempts a join rollouts r using (rollout_id) where r.attempt > a.attempt
group by all order by n desc, a.failure_code
"""
"""Attempts that ended before a later one of their rollout; `rollouts` has the last one alone."""

TIMINGS = " union all ".join(
    f"select '{name}' as stage, quantile_cont({name}_s, 0.5) as p50_s,"
    f" quantile_cont({name}_s, 0.95) as p95_s, sum({name}_s) as sum_s from rollouts"
    for name in ("queue", "init", "run", "llm", "tool", "eval")
)

STALE = "select count(*) as n from groups where event = 'stale'"

DECISIONS = (
    "select kept, reason, count(*) as n from groups where event = 'decided' group by all order by n"
    " desc"
)


def summarise(directory: str | Path) -> dict[str, Json]:
    """All figures of a stored run as JSON values."""
    from prorl.storage.read.catalog import StoredRun

    stored = StoredRun(directory)
    tables = stored.answers(TOTALS, STATES, FAILURES, RETRIED, TIMINGS, DECISIONS, STALE)
    (totals,), states, failures, retried, timings, decisions, (stale,) = (
        table.to_pylist() for table in tables
    )
    return {
        "run": stored.run_id,
        "directory": str(directory),
        **totals,
        "states": {row["status"]: row["n"] for row in states},
        "failures": failures,
        "retried": retried,
        "timings": {row.pop("stage"): row for row in timings},
        "groups_decided": decisions,
        "stale_groups": stale["n"],
        "bytes": sum(file.bytes for commit in stored.commits for file in commit.files),
    }


def present(directory: str | Path, *, json: bool, elapsed_s: float | None = None) -> int:
    """Print it; the exit code of the run: 1 when nothing came out."""
    summary = summarise(directory)
    if elapsed_s is not None:
        summary["elapsed_s"] = elapsed_s
    answer(summary, lines(summary), json=json)
    return 0 if summary["states"].get("completed") or not summary["rollouts"] else 1


def lines(summary: dict[str, Json]) -> Iterator[str]:
    elapsed_s = summary.get("elapsed_s")
    took = f" in {elapsed_s:.1f} s" if elapsed_s else ""
    rollouts = pluralize(summary["rollouts"], "rollout")
    yield f"{summary['run']}: {rollouts} in {pluralize(summary['groups'], 'group')}{took}"
    yield f"  reward    {_reward(summary)}"
    states = " · ".join(f"{state} {n:,}" for state, n in summary["states"].items())
    yield f"  states    {states or 'none'}"
    for row in summary["failures"]:
        failure = f"{row['failure_class']}/{row['failure_code']} {row['n']:,}"
        example = " ".join(clean(row["example"]).split())
        yield f"  failure   {failure}: {shortened(example, 300)}"
    for row in summary["retried"]:
        failure = f"{row['failure_class']}/{row['failure_code']} {row['n']:,}"
        root = root_option(Path(summary["directory"]).parent)
        example = f"prorl show {summary['run']} --rollout {row['first_rollout']}{root}"
        yield f"  retried   {failure}: `{example}` says why and where"
    # Rollouts whose policy was not done when a budget ended.
    for many, settings in (
        (summary["cut_by_tokens"], "sampling.max_tokens, limits.max_tokens"),
        (summary["cut_by_time"], "limits.run_s"),
    ):
        if many:
            yield f"  CUT OFF   {many:,} of {rollouts}: raise {settings}"
    yield f"  groups    {' · '.join(_decided(summary)) or 'none decided'}"
    yield f"  tokens    {_tokens(summary, elapsed_s)}"
    if summary["continued_calls"] + summary["rendered_calls"]:
        yield f"  endpoint  {_endpoint_words(summary)}"
    timings = (
        f"{stage} {row['p50_s'] or 0:.2f}/{row['p95_s'] or 0:.2f}"
        for stage, row in summary["timings"].items()
    )
    yield "  seconds   p50/p95: " + " · ".join(timings)
    look = "--worst" if summary["valid"] else "--failed"
    query = FAILED_SQL if summary["failures"] else BY_TASK_SQL
    yield from _stored(Path(summary["directory"]), summary["bytes"], look, query)


def _reward(summary: dict[str, Json]) -> str:
    mean, unscored = summary["mean_reward"], summary["rollouts"] - summary["valid"]
    words = ["-" if mean is None else f"mean {mean:.3f}"]
    words.append(f"rewarded {summary['rewarded']:,} of {summary['valid']:,} valid")
    return " · ".join([*words, f"{unscored:,} without a valid score"] if unscored else words)


def _endpoint_words(summary: dict[str, Json]) -> str:
    """Returns the words for what became of the calls of programs."""
    continued, calls = summary["continued_calls"], summary["model_calls"]
    changed = summary["retokenization_mismatches"]
    share, mismatch_share = continued / max(calls, 1), changed / max(continued, 1)
    words = [
        f"{continued:,} of {pluralize(calls, 'call')} ({share:.0%}) continued recorded ids",
        f"rendering again would have changed those of {changed:,} ({mismatch_share:.0%})",
    ]
    rare = ("rendered_calls", "forked_calls", "edited_replies", "unused_replies")
    named = {name: summary[name] for name in (*rare, "image_placeholders")}
    return " · ".join([*words, *(f"{name} {n:,}" for name, n in named.items() if n)])


def _decided(summary: dict[str, Json]) -> Iterator[str]:
    for row in summary["groups_decided"]:
        yield f"{'kept' if row['kept'] else 'dropped'} {row['n']:,} ({row['reason']})"
    num_decided = sum(row["n"] for row in summary["groups_decided"])
    if (undecided := summary["groups"] - num_decided) > 0:
        yield f"not decided {undecided:,}"
    if stale := summary["stale_groups"]:
        yield f"{stale:,} of the kept too stale to be handed out"


def _tokens(summary: dict[str, Json], elapsed_s: float | None) -> str:
    sampled = f"{summary['tokens']:,} ({summary['sampled_tokens']:,} sampled)"
    counts = f"{sampled} in {pluralize(summary['model_calls'], 'model call')}"
    if not elapsed_s:
        return counts
    rollouts = f"{summary['rollouts'] / elapsed_s:.1f} rollouts/s"
    speed = f"{summary['sampled_tokens'] / elapsed_s:,.0f} sampled tokens/s"
    return f"{counts} · {speed} · {rollouts}"


def _stored(directory: Path, num_bytes: int, look: str, query: str) -> Iterator[str]:
    """Yields the lines that say where the run is, and what to look at next."""
    megabytes, root = f"{num_bytes / 1e6:.1f} MB of Parquet", root_option(directory.parent)
    yield f"  stored    {directory}  ({megabytes}; every figure above is SQL over it)"
    yield f"  next      prorl show {directory.name} {look}{root}"
    yield f'            prorl sql {directory.name} "{query}"{root}'
