"""How a demo ended, for people: a table and lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prorl.cli.output import say, table
from prorl.cli.runs import root_option
from prorl.types import Json

if TYPE_CHECKING:
    pass


COLUMNS = (
    "set",
    "groups",
    "held-out before",
    "held-out after",
    "greedy before",
    "greedy after",
    "DAPO kept",
    "dropped",
    "turns",
    "tokens",
    "exact tokens",
)


def present(found: dict[str, Json], *, elapsed_s: float, cpu: float) -> None:
    """Print the report for people."""
    say()
    title = f"{found['run']}: held-out reward at temperature 1 (95 % Wilson), greedy beside it"
    table(COLUMNS, _rows(found), title=title)
    for line in _lines(found, elapsed_s, cpu):
        say(line)


def _rows(found: dict[str, Json]) -> Iterator[tuple[object, ...]]:
    for row in found["sets"]:
        held = [
            _share(row[f"{mode}_{when}"], mode == "sampled")
            for mode in ("sampled", "greedy")
            for when in ("before", "after")
        ]
        exact = f"{row['exact_share']:.2%}"
        yield (
            row["set"],
            row["groups"],
            *held,
            row["kept"],
            row["dropped"],
            round(row["turns"], 2),
            row["tokens"],
            exact,
        )


def _share(one: dict[str, float] | None, interval: bool) -> str:
    if one is None:
        return "-"
    return f"{one['value']:.3f}" + (f" [{one['low']:.2f}, {one['high']:.2f}]" if interval else "")


def _lines(found: dict[str, Json], elapsed_s: float, cpu: float) -> Iterator[str]:
    times, count = found["times"], len(found["steps"])
    parts = ("sampling", "tools", "sandbox start", "scoring", "training", "checkpoint and publish")
    yield f"  steps     {count} of {times['step_s']:.1f} s: " + " · ".join(
        f"{part} {times[f'{part}_s']:.2f}" for part in parts
    )
    if times["run_waiting_share"] is not None:
        rate = f"{times['sampled_tokens_per_s']:,.0f} sampled tokens/s"
        yield f"  RUN       waits {times['run_waiting_share']:.0%} of its slots' time; {rate}"
        yield (
            f"  logprobs  sampler against trainer: at most {times['logprob_diff_max']:.1e} apart"
            " over the whole run"
        )
    yield f"  cost      {elapsed_s:.0f} s, {cpu:.0f} CPU s, sandboxes included"
    yield from _left(Path(found["directory"]))


def _left(directory: Path) -> Iterator[str]:
    """What the demo left behind, and what to look at next."""
    name, root = directory.name, root_option(directory.parent)
    yield f"  curve     {directory / 'reward.png'}"
    yield (
        f"  weights   {directory / 'training' / 'checkpoints'}  (transformers, vLLM and `prorl eval"
        " --policy DIR` load them)"
    )
    yield f"  next      prorl show {name} --best{root}"
    yield (
        f'            prorl sql {name} "select max_version, avg(reward) from rollouts where valid'
        f' group by all order by 1"{root}'
    )
    yield f"            prorl replay {name}{root}"
