"""Questions that everybody asks of a run, ready as SQL.

Each is a SELECT that gives `x`, `y` (of several lines, `z` names them; of a stack, `x` and several
numbers) and what else is worth seeing, and the kind of picture that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One ready question to the tables of a run."""

    title: str
    part: str
    """The question that it belongs to; those of one part stand together."""
    sql: str
    picture: Literal["line", "bars", "stack"] = "bars"
    axis: str = ""
    """The label of the x axis of a line or stack."""
    where: str = ""
    """The rollouts that an x stands for, as a filter in which it is `{x}`; empty: none."""


_MEMBER = "status = 'completed' and valid"
_LEARNING, _GROUPS, _TIME = "Learning", "From tasks to groups", "Where the time went"

ANALYSES: dict[str, Analysis] = {
    "reward": Analysis(
        title="Mean reward by policy version",
        part=_LEARNING,
        axis="oldest policy version of a rollout",
        sql=f"""
select min_version as x, avg(reward) as y, count(*) as rollouts
from rollouts where {_MEMBER}
group by 1 order by 1""",
        picture="line",
        where="valid and min_version = {x}",
    ),
    "rewards": Analysis(
        title="Rollouts by reward",
        part=_LEARNING,
        axis="reward",
        sql=f"""
select round(reward, 2) as x, count(*) as y from rollouts where {_MEMBER}
group by 1 order by 1 limit 200""",
        where="valid and round(reward, 2) = {x}",
    ),
    "sources": Analysis(
        title="Mean reward by source of tasks and policy version",
        part=_LEARNING,
        axis="oldest policy version of a rollout",
        sql=f"""
select min_version as x, avg(reward) as y, coalesce(nullif(data_source, ''), env) as z,
    count(*) as rollouts
from rollouts where {_MEMBER}
group by all order by 1, 3""",
        picture="line",
        where="valid and min_version = {x}",
    ),
    "pass": Analysis(
        title="pass@k: share of groups with a full reward among k members",
        part=_LEARNING,
        axis="k, rollouts of a group",
        sql="""
select k as x, avg(pass_at_k) as y, count(*) as groups from passk where k <= 16
group by 1 order by 1""",
        picture="line",
    ),
    "length": Analysis(
        title="Mean sampled tokens of a rollout, with and without a reward",
        part=_LEARNING,
        sql=f"""
select if(reward > 0, 'rewarded', 'not rewarded') as x, avg(num_sampled) as y,
    max(num_sampled) as longest, count(*) as rollouts
from rollouts where {_MEMBER}
group by 1 order by 1""",
        where="valid and if(reward > 0, 'rewarded', 'not rewarded') = {x}",
    ),
    "drift": Analysis(
        title="Mean logprob of sampled tokens by policy version",
        part=_LEARNING,
        axis="oldest policy version of a rollout",
        sql=f"""
select min_version as x, sum(logprob_sum) / sum(num_sampled) as y, sum(num_sampled) as tokens
from rollouts where {_MEMBER} and logprob_sum is not null and num_sampled > 0
group by 1 order by 1""",
        picture="line",
        where="valid and min_version = {x}",
    ),
    "mismatch": Analysis(
        title="Learner minus sampler: mean absolute difference of logprobs, by trainer's step",
        part=_LEARNING,
        axis="trainer step",
        sql="""
select step as x, avg(list_avg(list_transform(
        list_zip(learner_logprobs, logprobs), lambda pair: abs(pair[1] - pair[2])))) as y,
    count(*) as sequences
from trained join (select sequence_id, logprobs from sequences
    where sequence_id in (select sequence_id from trained)) using (sequence_id)
where learner_logprobs is not null group by 1 order by 1""",
        picture="line",
        where="rollout_id in (select rollout_id from trained where step = {x})",
    ),
    "staleness": Analysis(
        title="Rollouts by policy versions within them (newest minus oldest)",
        part=_LEARNING,
        sql=f"""
select max_version - min_version as x, count(*) as y
from rollouts where {_MEMBER}
group by 1 order by 1""",
        where="valid and max_version - min_version = {x}",
    ),
    "suspects": Analysis(
        title="Reward-hack suspects: tokens of a rewarded rollout, as a share of its task's median",
        part=_LEARNING,
        sql=f"""
select rollout_id::varchar as x, num_sampled / greatest(usual, 1) as y, task_id, reward from (
    select rollout_id, task_id, reward, num_sampled,
        median(num_sampled) over (partition by task_id) as usual,
        count(*) over (partition by task_id) as n from rollouts where {_MEMBER} and reward > 0)
where n >= 4 and num_sampled < usual / 3 order by y limit 20""",
        where="rollout_id = {x}",
    ),
    "funnel": Analysis(
        title="From accepted groups to delivered ones",
        part=_GROUPS,
        sql="""
select * from (
    select 'accepted' as x, count(*) as y from tasks
    union all (unpivot (
        select count(*) filter (event = 'decided') as decided,
            count(*) filter (event = 'decided' and kept) as kept,
            count(*) filter (event = 'delivered') as delivered,
            count(*) filter (event = 'stale') as stale
        from groups) on * into name x value y))""",
    ),
    "kept": Analysis(
        title="Groups kept and dropped by policy version (the oldest in a group)",
        part=_GROUPS,
        axis="policy version",
        sql="""
select min_version as x, count(*) filter (kept) as kept, count(*) filter (not kept) as dropped
from groups where event = 'decided' and min_version >= 0 group by 1 order by 1""",
        picture="stack",
        where="group_id in (select group_id from groups where event = 'decided'"
        " and min_version = {x})",
    ),
    "dropped": Analysis(
        title="Why groups were dropped",
        part=_GROUPS,
        sql="""
select reason as x, count(*) as y
from groups where event = 'decided' and not kept
group by 1 order by 2 desc limit 20""",
        where="group_id in (select group_id from groups"
        " where event = 'decided' and not kept and reason = {x})",
    ),
    "outcomes": Analysis(
        title="How rollouts ended, over the run",
        part=_GROUPS,
        axis="twentieths of the run, in the order of commits",
        sql="""
select part as x, count(*) filter (valid and reward > 0) as rewarded,
    count(*) filter (valid and coalesce(reward, 0) <= 0) as "no reward",
    count(*) filter (not valid and failure_class in ('', 'policy')) as masked,
    count(*) filter (failure_class = 'infra') as infra,
    count(*) filter (failure_class = 'task') as task,
    count(*) filter (status = 'cancelled') as cancelled
from (select *, ntile(20) over (order by committed_at, rollout_id) as part from rollouts)
group by 1 order by 1""",
        picture="stack",
    ),
    "failures": Analysis(
        title="Rollouts that failed, were cut off or cancelled, by class and code",
        part=_GROUPS,
        sql="""
select failure_class || '/' || failure_code as x, count(*) as y,
    count(*) filter (not valid) as unscored, min(failure_message) as example
from rollouts where failure_code <> ''
group by 1 order by 2 desc limit 20""",
        where="failure_class || '/' || failure_code = {x}",
    ),
    "time": Analysis(
        title="Seconds of a rollout by stage, over the run",
        part=_TIME,
        axis="twentieths of the run, in the order of commits",
        sql="""
select part as x, avg(queue_s) as waiting, avg(init_s) as "INIT", avg(llm_s) as "model calls",
    avg(tool_s) as tools, avg(greatest(run_s - llm_s - tool_s, 0)) as "rest of RUN",
    avg(eval_s) as "EVAL"
from (select *, ntile(20) over (order by committed_at, rollout_id) as part from rollouts)
group by 1 order by 1""",
        picture="stack",
    ),
    "servers": Analysis(
        title="Sampled tokens per second of a model call, by server",
        part=_TIME,
        sql="""
select backend as x, sum(completion_tokens) / nullif(sum(llm_s), 0) as y, count(*) as calls,
    quantile_cont(llm_s, 0.95) as p95_s
from turns group by 1 order by 2 desc""",
        where="rollout_id in (select rollout_id from turns where backend = {x})",
    ),
    "slow": Analysis(
        title="Tasks that take longest (mean seconds in RUN)",
        part=_TIME,
        sql="""
select task_id as x, avg(run_s) as y, avg(reward) as reward, count(*) as rollouts
from rollouts group by 1 order by 2 desc limit 15""",
        where="task_id = {x}",
    ),
    "stragglers": Analysis(
        title="Groups by how many times their median rollout the slowest one takes",
        part=_TIME,
        sql="""
select ratio as x, count(*) as y from (
    select least(floor(max(run_s) / greatest(median(run_s), 1e-9)), 10)::int as ratio
    from rollouts where status = 'completed' group by group_id having count(*) > 1)
group by 1 order by 1""",
    ),
    "tools": Analysis(
        title="Tool calls by turn",
        part=_TIME,
        sql="""
select turn as x, sum(tool_calls) as y, avg(tool_s) as mean_tool_s
from turns group by 1 order by 1 limit 64""",
        where="num_turns > {x}",
    ),
    "reuse": Analysis(
        title="Share of repeated prompt tokens that prefix caches had, by server",
        part=_TIME,
        sql="""
select backend as x, sum(least(cached_tokens, repeated)) / nullif(sum(repeated), 0) as y,
    sum(cached_tokens) as cached, sum(prompt_tokens) as prompt, count(*) as calls
from (
    select backend, cached_tokens, prompt_tokens, least(prompt_tokens, coalesce(
        lag(prompt_tokens + completion_tokens) over (
            partition by rollout_id, attempt, segment order by turn), 0)) as repeated
    from turns)
group by 1 order by 1""",
        where="rollout_id in (select rollout_id from turns where backend = {x})",
    ),
    "cost": Analysis(
        title="Seconds of model and tools per unit of reward, by source of tasks",
        part=_TIME,
        sql=f"""
select coalesce(nullif(data_source, ''), env) as x,
    sum(llm_s + tool_s) / nullif(sum(reward), 0) as y, sum(num_sampled) as tokens
from rollouts where {_MEMBER}
group by 1 order by 1 limit 20""",
        where="coalesce(nullif(data_source, ''), env) = {x}",
    ),
}
