"""`prorl bench learning`: does the demo learn, whatever the seeds?

Whole demos, one after another, on fresh held-out tasks.

Two starting checkpoints (the shipped toy, and one that `make checkpoint SEED=1` makes here), three
training seeds each, 512 held-out tasks of each set before and after, sampled at temperature 1 and
greedily; and a control with shuffled rewards, which must not learn. About an hour on two cores, in
the repository; an interrupted bench goes on where it was when it is started again.

Everything lies in prorl-runs/learning: the runs, `curves.parquet` (reward of what each policy
version sampled) and `heldout.parquet` (shares with Wilson's 95 % interval).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from prorl.bench.report import Figure, Report
from prorl.types import Json

ROOT = Path("prorl-runs/learning")
HELDOUT_SEED = 512
"""Used here only: the demo's own held-out tasks were looked at while its recipe was found."""


START, GOAL, CONTROL_RISE = 0.5, 0.85, 0.1
"""Held-out shares: below before, above after; the control rises by no more."""


class Study(NamedTuple):
    """One demo: the checkpoint that it begins with, its seed, whether it is the control."""

    checkpoint: int
    """Seed that the starting checkpoint was made with; 0 is the one that ships."""
    seed: int
    control: bool = False

    @property
    def name(self) -> str:
        return f"toy{self.checkpoint}-seed{self.seed}" + ("-control" if self.control else "")


STUDIES = (
    *(Study(checkpoint, seed) for checkpoint in (0, 1) for seed in (0, 1, 2)),
    Study(0, 0, control=True),
)


async def run(quick: bool) -> Report:
    """All studies; `quick` runs two steps of one of them and proves nothing."""
    root = ROOT / "quick" if quick else ROOT
    root.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Json] = (
        {"steps": 2, "heldout": 8, "greedy": 8} if quick else {"heldout": 512, "greedy": 512}
    )
    found = [
        (study, await _demo(study, root, sizes)) for study in (STUDIES[:1] if quick else STUDIES)
    ]
    heldout = list(_heldout(found))
    curves = [{**study._asdict(), **point} for study, demo in found for point in demo["curve"]]
    pq.write_table(pa.Table.from_pylist(heldout), root / "heldout.parquet")
    pq.write_table(pa.Table.from_pylist(curves), root / "curves.parquet")
    return Report(bench="learning", rows=tuple(_rows(found)))


async def _demo(study: Study, root: Path, sizes: dict[str, Json]) -> Json:
    """Run or go on with one demo; what it printed."""
    recipe: dict[str, Json] = {
        "seed": study.seed,
        "minutes": 600.0,
        "heldout_seed": HELDOUT_SEED,
        **sizes,
    }
    if study.checkpoint:
        made = root / f"checkpoint-{study.checkpoint}"
        recipe["model"] = str(made)
        if not (made / "model.safetensors").exists():
            seed = str(study.checkpoint)
            await _output("configs.toy.train", "--seed", seed, "--out", str(made))
    if study.control:
        recipe["control"] = "shuffled-rewards"
    file = root / f"{study.name}.json"
    file.write_text(json.dumps(recipe))
    again = (root / study.name / "demo.json").exists()
    how = ("--resume",) if again else ("--config", str(file))
    text = await _output(
        "prorl.cli", "demo", "--json", "--root", str(root), "--name", study.name, *how
    )
    return json.loads(text)


async def _output(module: str, *args: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *args, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{module} {' '.join(args)} ended with {process.returncode}")
    return output


def _heldout(found: list[tuple[Study, Json]]) -> Iterator[dict[str, Json]]:
    for study, demo in found:
        for row in demo["sets"]:
            for mode in ("sampled", "greedy"):
                for when in ("before", "after"):
                    share = row[f"{mode}_{when}"]
                    yield {
                        **study._asdict(),
                        "set": row["set"],
                        "mode": mode,
                        "when": when,
                        "tasks": demo["recipe"]["heldout"],
                        **share,
                    }


def _rows(found: list[tuple[Study, Json]]) -> Iterator[Figure]:
    befores, afters, rises = [], [], []
    for study, demo in found:
        for row in demo["sets"]:
            first, last = row["sampled_before"], row["sampled_after"]
            sampled = " -> ".join(
                f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in (first, last)
            )
            greedy = f"{row['greedy_before']['value']:.3f} -> {row['greedy_after']['value']:.3f}"
            yield Figure(
                what=f"heldout_after.{study.name}.{row['set']}",
                value=last["value"],
                unit="share",
                cpu_s=demo["cpu_s"] / len(demo["sets"]),
                note=f"{sampled}, greedy {greedy}",
            )
            if study.control:
                rises.append(last["value"] - first["value"])
            else:
                befores.append(first["value"])
                afters.append(last["value"])
    extremes = [
        ("before_max", max(befores), befores, f"bar: below {START}"),
        ("after_min", min(afters), afters, f"bar: above {GOAL}"),
    ]
    if rises:
        note = f"bar: at most {CONTROL_RISE}"
        extremes.append(("control_rise_max", max(rises), rises, note))
    for what, value, shares, note in extremes:
        yield Figure(what=what, value=value, unit="share", repeats=tuple(shares), note=note)
    diffs = tuple(demo["times"]["logprob_diff_max"] for _, demo in found)
    note = "sampler against trainer, whole runs; bar: 1e-4"
    yield Figure(what="logprob_diff_max", value=max(diffs), unit="nats", repeats=diffs, note=note)
