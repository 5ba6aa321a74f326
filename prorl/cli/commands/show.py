"""`prorl show`: the runs of a root, a run in figures, or one rollout as a transcript."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from prorl import exact_json
from prorl.cli.options import Flag, JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer, clean, note, say, say_json, table
from prorl.cli.runs import run_directory
from prorl.cli.summary import present
from prorl.errors import NotFoundError, ProrlError, UserError
from prorl.pluralize import pluralize
from prorl.storage.files.runs import below, list_runs
from prorl.storage.read.catalog import StoredRun

if TYPE_CHECKING:
    from prorl.types import Json

_LINE = (
    "select count(*) as n, avg(reward) filter (valid) as reward, count(*) filter (status <>"
    " 'completed') as other from rollouts"
)

CUT_BY = {
    "max_tokens": "sampling.max_tokens or limits.max_tokens",
    "context": "limits.max_tokens",
    "deadline": "limits.run_s",
}
"""The budget that ended before the policy did, by stop reason."""
_CHOICES = {
    "worst": (
        "select rollout_id from rollouts where valid order by reward, num_turns desc, rollout_id"
        " limit 1"
    ),
    "best": (
        "select rollout_id from rollouts where valid order by reward desc, num_turns, rollout_id"
        " limit 1"
    ),
    "failed": (
        "select rollout_id from rollouts where failure_code <> '' order by rollout_id limit 1"
    ),
}


def show(
    run: StoredName = "",
    /,
    *,
    rollout: int | None = None,
    worst: Flag = False,
    best: Flag = False,
    failed: Flag = False,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """List the runs of a root; with RUN, print its figures; with --rollout, --worst, --best or
    --failed, print one rollout as a transcript.

    A run that cannot be read is listed with its error beside the others, and the exit code is 1.

    Example: prorl show

    Example: prorl show my-run --worst

    Parameters
    ----------
    rollout
        The rollout with this id, with the attempts that ended before its last one.
    worst
        The valid rollout with the smallest reward.
    best
        The valid rollout with the greatest reward.
    failed
        The first rollout with a failure code.
    """
    wishes = {"worst": worst, "best": best, "failed": failed}
    chosen = [name for name, is_chosen in wishes.items() if is_chosen]
    if len(chosen) + (rollout is not None) > 1:
        raise UserError(
            "several options that choose a rollout", "one of --rollout, --worst, --best, --failed"
        )
    if not run:
        if chosen or rollout is not None:
            raise UserError(
                "an option that chooses a rollout, without a run",
                "the name of a run before the option",
            )
        return _show_root(root, json=json)
    directory = run_directory(run, root)
    if not chosen and rollout is None:
        return present(directory, json=json)
    stored = StoredRun(directory)
    record = transcript(stored, _choose(stored, chosen[0]) if chosen else int(rollout or 0))
    answer(record, lines(record), json=json)
    return 0


def _show_root(root: str, *, json: bool) -> int:
    rows: list[dict[str, Json]] = []
    bad: list[dict[str, Json]] = []
    for name in list_runs(root):
        try:
            stored = StoredRun(below(root, name))
            (line,) = stored.sql(_LINE).to_pylist()
        except ProrlError as error:
            bad.append({"run": name, "error": str(error)})
            continue
        rows.append(
            {
                "run": name,
                "rollouts": line["n"],
                "reward": line["reward"],
                "not_completed": line["other"],
                "bytes": sum(file.bytes for commit in stored.commits for file in commit.files),
            }
        )
    if json:
        say_json([*rows, *bad])
    elif not rows and not bad:
        say(f"no runs in {root}; `prorl demo` makes one")
    else:
        table(
            ("run", "rollouts", "reward", "not completed", "MB"),
            [(*list(row.values())[:4], f"{row['bytes'] / 1e6:.1f}") for row in rows],
        )
        for row in bad:
            note(f"{row['run']}: {row['error']}")
    return 1 if bad else 0


def _choose(stored: StoredRun, choice: str) -> int:
    rows = stored.sql(_CHOICES[choice]).to_pylist()
    if not rows:
        raise NotFoundError(f"run {stored.run_id} has no {choice} rollout")
    return int(rows[0]["rollout_id"])


def transcript(stored: StoredRun, rollout_id: int) -> dict[str, Json]:
    """Returns everything stored of one rollout but its tokens. Raises NotFoundError."""
    tables = stored.rollout(rollout_id)
    return {
        "rollout": tables["rollouts"].to_pylist()[0],
        "messages": tables["messages"].sort_by("index").to_pylist(),
        "turns": tables["turns"].sort_by("turn").to_pylist(),
        "attempts": stored.attempts(rollout_id),
    }


def lines(record: dict[str, Json]) -> Iterator[str]:
    """Yields a transcript for people: messages and calls in order, then the grading."""
    rollout = record["rollout"]
    ids = f"sample {rollout['sample_index']} · attempt {rollout['attempt']}"
    yield f"rollout {rollout['rollout_id']} · task {clean(rollout['task_id'])} · {ids}"
    for attempt in record["attempts"]:
        yield ""
        yield from _attempt(attempt)
        if not record["messages"]:  # nothing of it committed: what was played is all there is
            yield from _played(attempt)
    yield from _played(record)
    yield ""
    yield from _verdict(rollout, [attempt["failure_message"] for attempt in record["attempts"]])


def _attempt(attempt: dict[str, Any]) -> Iterator[str]:
    """Yields the lines that say why and where an attempt ended that did not commit."""
    places = (attempt[name] for name in ("worker", "node", "server"))
    where = " · ".join(filter(None, map(clean, places)))
    sampled = pluralize(attempt["num_sampled"], "token")
    stage = f" in {attempt['stage'].upper()}" if attempt["stage"] else ""
    yield (
        f"attempt {attempt['attempt']} ended{stage} after {attempt['seconds']:.2f} s,"
        f" {sampled} sampled · {where}"
    )
    reason = f"{attempt['failure_class']}/{attempt['failure_code']}"
    yield f"  {reason}: {clean(attempt['failure_message'])}"


def _played(record: dict[str, Json]) -> Iterator[str]:
    turns = {turn["turn"]: turn for turn in record["turns"]}
    for message in record["messages"]:
        # the figures of a turn stand above the first thing that the policy said in it
        own = message["role"] == "assistant"
        yield ""
        yield _heading(message, turns.pop(message["turn"], None) if own else None)
        yield from (f"  ~ {line}" for line in clean(message.get("reasoning", "")).splitlines())
        yield from (f"  {line}" for line in clean(message["content"]).splitlines())
        yield from (f"  -> {clean(call)}" for call in _calls(message["tool_calls"]))


def _heading(message: dict[str, Any], turn: dict[str, Any] | None) -> str:
    name = f" {message['name']}" if message["name"] else ""
    if turn is None:
        return f"[{message['role']}{name}]"
    sampled = (
        f"{pluralize(turn['completion_tokens'], 'token')} after {turn['prompt_tokens']:,},"
        f" {turn['finish_reason']}"
    )
    return (
        f"[{message['role']}{name}] turn {turn['turn']} · {sampled} · model {turn['llm_s']:.2f} s ·"
        f" tools {turn['tool_s']:.2f} s"
    )


def _calls(text: str) -> Iterator[str]:
    for call in exact_json.loads(text) if text else []:
        arguments = call.get("arguments") or {}
        argument_list = ", ".join(f"{name}={_argument(value)}" for name, value in arguments.items())
        yield f"{call['name']}({argument_list})" + (
            f"  ! {call['error']}" if call.get("error") else ""
        )


def _argument(value: Json) -> str:
    """Short values as they are; text of several lines as an indented block."""
    return (
        "\n     " + value.replace("\n", "\n     ")
        if isinstance(value, str) and "\n" in value
        else repr(value)
    )


def _refusal(phase: str, refusal: dict[str, Any]) -> str:
    """A host that a sandbox tried to reach in a phase and may not."""
    host = clean(f"{refusal['host']}:{refusal['port']}")
    return f"refused to the {phase}: {host} ({clean(refusal['reason'])}), {refusal['times']} times"


def _verdict(rollout: dict[str, Any], of_attempts: Collection[str]) -> Iterator[str]:
    """Yields how a rollout ended. `of_attempts`: messages of its attempts, which the transcript has
    already.
    """
    reward = "none" if rollout["reward"] is None else f"{rollout['reward']:g}"
    parts = " + ".join(
        f"{part['name']} {part['value']:g} x {part['weight']:g}" for part in rollout["reward_parts"]
    )
    yield f"{rollout['status']} · stopped: {rollout['stop_reason'] or '-'} · reward {reward}" + (
        f" = {parts}" if parts else ""
    )
    if cut_by := CUT_BY.get(rollout["stop_reason"]):
        yield f"CUT OFF: its policy was not done; raise {cut_by}"
    if rollout.get("continued_calls") or rollout.get("rendered_calls"):
        columns = (
            "continued_calls",
            "rendered_calls",
            "forked_calls",
            "edited_replies",
            "unused_replies",
            "retokenization_mismatches",
            "image_placeholders",
        )
        yield "model endpoint " + " · ".join(f"{name} {rollout[name]}" for name in columns)
    if rollout["failure_code"]:
        message = rollout["failure_message"]
        yield f"failure {rollout['failure_class']}/{rollout['failure_code']}" + (
            "" if message in of_attempts else f": {clean(message)}"
        )
    for phase in ("agent", "verifier"):
        yield from map(_refusal, repeat(phase), rollout.get(f"{phase}_refusals") or ())
    if rollout.get("worker"):
        places = (rollout[name] for name in ("worker", "node", "server"))
        yield "on " + " · ".join(filter(None, map(clean, places)))
    names = ("queue", "init", "run", "llm", "tool", "eval")
    yield "seconds " + " · ".join(f"{name} {rollout[f'{name}_s']:.2f}" for name in names)
