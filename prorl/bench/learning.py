"""`prorl bench learning`: does the demo learn, whatever the seeds?

Whole demos, one after another, on fresh held-out tasks.

Two starting checkpoints (the shipped toy, and one that `make checkpoint SEED=1` makes here), three
training seeds each, 512 held-out tasks of each set before and after, sampled at temperature 1 and
greedily; and a control with shuffled rewards, which must not learn. About an hour on two cores; an
interrupted bench goes on where it was when it is started again in the same folder.

Everything lies in prorl-runs/learning: the runs, `curves.parquet` (reward of what each policy
version sampled), `heldout.parquet` (shares with Wilson's 95 % interval) and `curves.png` drawn from
these two.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prorl.bench.learning_picture import draw
from prorl.bench.learning_study import CONTROL_RISE, GOAL, START, Study
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.tasks.generated import SETS
from prorl.types import Json

ROOT = Path("prorl-runs/learning")
HELDOUT_SEED = 512
"""Used here only: the demo's own held-out tasks were looked at while its recipe was found."""


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
    heldout, curves = (
        pa.Table.from_pylist(list(_heldout(found))),
        pa.Table.from_pylist(list(_curves(found))),
    )
    pq.write_table(heldout, root / "heldout.parquet")
    pq.write_table(curves, root / "curves.parquet")
    draw(heldout, curves, root / "curves.png")
    return Report(bench="learning", machine=machine(), rows=tuple(_rows(found, heldout)))


async def _demo(study: Study, root: Path, sizes: dict[str, Json]) -> Json:
    """Run or go on with one demo; what it printed."""
    recipe: dict[str, Json] = {
        "seed": study.seed,
        "minutes": 600.0,
        "heldout_seed": HELDOUT_SEED,
        **sizes,
    }
    if study.checkpoint:
        recipe["model"] = str(await _checkpoint(study.checkpoint, root))
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


async def _checkpoint(seed: int, root: Path) -> Path:
    directory = root / f"checkpoint-{seed}"
    if not (directory / "model.safetensors").exists():
        await _output("prorl.trainer.sft", "--seed", str(seed), "--out", str(directory))
    return directory


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
                        **_of(study),
                        "set": row["set"],
                        "mode": mode,
                        "when": when,
                        "tasks": demo["recipe"]["heldout"],
                        **share,
                    }


def _curves(found: list[tuple[Study, Json]]) -> Iterator[dict[str, Json]]:
    for study, demo in found:
        yield from ({**_of(study), **point} for point in demo["curve"])


def _of(study: Study) -> dict[str, Json]:
    return {"checkpoint": study.checkpoint, "seed": study.seed, "control": study.control}


Shares = dict[tuple[str, str], Json]
"""(mode, when) -> a held-out share of one study and one set."""


def _rows(found: list[tuple[Study, Json]], heldout: pa.Table) -> Iterator[Figure]:
    shares = _shares(heldout)
    befores, afters, rises = [], [], []
    for study, demo in found:
        for name in SETS:
            at = shares[*study, name]
            yield _after(study, name, at, demo["cpu_s"] / len(SETS))
            before, after = (at["sampled", when]["value"] for when in ("before", "after"))
            if study.control:
                rises.append(after - before)
            else:
                befores.append(before)
                afters.append(after)
    yield _extreme("before_max", max, befores, f"bar: below {START}")
    yield _extreme("after_min", min, afters, f"bar: above {GOAL}")
    if rises:
        yield _extreme("control_rise_max", max, rises, f"bar: at most {CONTROL_RISE}")
    diffs = tuple(demo["times"]["logprob_diff_max"] for _, demo in found)
    note = "sampler against trainer, whole runs; bar: 1e-4"
    yield Figure(what="logprob_diff_max", value=max(diffs), unit="nats", repeats=diffs, note=note)


def _shares(heldout: pa.Table) -> dict[tuple[Json, ...], Shares]:
    """(checkpoint, seed, control, set) -> its held-out shares."""
    found: dict[tuple[Json, ...], Shares] = defaultdict(dict)
    for row in heldout.to_pylist():
        key = (row["checkpoint"], row["seed"], row["control"], row["set"])
        found[key][row["mode"], row["when"]] = row
    return found


def _after(study: Study, name: str, at: Shares, cpu_s: float) -> Figure:
    """What a study could do at its end, with where it began in the note."""
    greedy = " -> ".join(f"{at['greedy', when]['value']:.3f}" for when in ("before", "after"))
    sampled = " -> ".join(_interval(at["sampled", when]) for when in ("before", "after"))
    return Figure(
        what=f"heldout_after.{study.name}.{name}",
        value=at["sampled", "after"]["value"],
        unit="share",
        cpu_s=cpu_s,
        note=f"{sampled}, greedy {greedy}",
    )


def _extreme(
    what: str, pick: Callable[[Sequence[float]], float], shares: Sequence[float], note: str
) -> Figure:
    return Figure(what=what, value=pick(shares), unit="share", repeats=tuple(shares), note=note)


def _interval(share: Json) -> str:
    return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"
