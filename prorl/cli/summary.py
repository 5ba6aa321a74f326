"""What a run was, read back from its Parquet files by SQL: never from counters of the processes
that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prorl.cli.output import clean, say, say_json
from prorl.types import Json

TOTALS = """
select count(*) as rollouts, count(distinct rollout_id) as distinct_rollouts,
    count(distinct group_id) as groups,
    count(*) filter (valid) as valid, count(*) filter (reward > 0) as rewarded,
    avg(reward) filter (valid) as mean_reward,
    coalesce(sum(num_turns), 0)::bigint as model_calls,
    coalesce(sum(num_tool_calls), 0)::bigint as tool_calls,
    coalesce(sum(num_tokens), 0)::bigint as tokens,
    coalesce(sum(num_sampled), 0)::bigint as sampled_tokens,
    max(attempt) as max_attempt
from rollouts
"""

STATES = "select status, count(*) as n from rollouts group by status order by status"

FAILURES = """
select failure_class, failure_code, count(*) as n, min(failure_message) as example
from rollouts where failure_code <> '' group by all order by n desc, failure_code
"""

TIMINGS = " union all ".join(
    f"select '{name}' as what, quantile_cont({name}_s, 0.5) as p50_s, quantile_cont({name}_s, 0.95)"
    f" as p95_s, sum({name}_s) as sum_s from rollouts"
    for name in ("queue", "init", "run", "llm", "tool", "eval")
)

DECISIONS = (
    "select kept, reason, count(*) as n from groups where event = 'decided' group by all order by n"
    " desc"
)


def summarise(directory: str | Path) -> dict[str, Json]:
    """All figures of a stored run as JSON values."""
    from prorl.storage.catalog import StoredRun

    stored = StoredRun(directory)
    (totals,) = stored.sql(TOTALS).to_pylist()
    return {
        "run": stored.run_id,
        "directory": str(directory),
        **totals,
        "states": {row["status"]: row["n"] for row in stored.sql(STATES).to_pylist()},
        "failures": stored.sql(FAILURES).to_pylist(),
        "timings": {row.pop("what"): row for row in stored.sql(TIMINGS).to_pylist()},
        "groups_decided": stored.sql(DECISIONS).to_pylist(),
        "bytes": sum(file.bytes for commit in stored.commits for file in commit.files),
    }


def present(directory: str | Path, *, json: bool, elapsed_s: float | None = None) -> int:
    """Print it; the exit code of the run: 1 when nothing came out."""
    summary = summarise(directory)
    if elapsed_s is not None:
        summary["elapsed_s"] = elapsed_s
    if json:
        say_json(summary)
    else:
        for line in lines(summary):
            say(line)
    return 0 if summary["states"].get("completed") or not summary["rollouts"] else 1


def lines(summary: dict[str, Json]) -> Iterator[str]:
    """The summary as lines for people."""
    elapsed_s = summary.get("elapsed_s")
    took = f" in {elapsed_s:.1f} s" if elapsed_s else ""
    yield (
        f"{summary['run']}: {summary['rollouts']:,} rollouts in {summary['groups']:,} groups{took}"
    )
    mean = summary["mean_reward"]
    masked = summary["rollouts"] - summary["valid"]
    reward = "-" if mean is None else f"mean {mean:.3f}"
    yield f"  reward    {reward} · rewarded {summary['rewarded']:,}/{summary['rollouts']:,}" + (
        f" · masked {masked:,}" if masked else ""
    )
    yield "  states    " + (
        " · ".join(f"{state} {n:,}" for state, n in summary["states"].items()) or "none"
    )
    for row in summary["failures"]:
        yield (
            f"  failure   {row['failure_class']}/{row['failure_code']} {row['n']:,}:"
            f" {clean(row['example'])[:100]}"
        )
    decided = (
        f"{'kept' if row['kept'] else 'dropped'} {row['n']:,} ({row['reason']})"
        for row in summary["groups_decided"]
    )
    yield "  groups    " + (" · ".join(decided) or "none decided")
    rate = (
        f" · {summary['tokens'] / elapsed_s:,.0f} tokens/s · {summary['rollouts'] / elapsed_s:.1f}"
        " rollouts/s"
        if elapsed_s
        else ""
    )
    yield (
        f"  tokens    {summary['tokens']:,} ({summary['sampled_tokens']:,} sampled) in"
        f" {summary['model_calls']:,} model calls{rate}"
    )
    timings = (
        f"{what} {row['p50_s'] or 0:.2f}/{row['p95_s'] or 0:.2f}"
        for what, row in summary["timings"].items()
    )
    yield "  seconds   p50/p95: " + " · ".join(timings)
    directory = Path(summary["directory"])
    yield (
        f"  stored    {directory}  ({summary['bytes'] / 1e6:.1f} MB of Parquet; every figure above"
        " is SQL over it)"
    )
    root = (
        "" if directory.parent == Path("prorl-runs").absolute() else f" --root {directory.parent}"
    )
    yield f"  next      prorl show {directory.name} --worst{root}"
    yield (
        f'            prorl sql {directory.name} "select failure_code, count(*) from rollouts group'
        f' by all"{root}'
    )
