"""Plays tasks that `play.py` has played by Harbor's own runner, and compares the rewards.

    python configs/harbor/compare.py --played played.jsonl --python HARBOR_VENV/bin/python

HARBOR_VENV is a Python 3.12 with `harbor==0.26.0`. Harbor's nop plays each task, its oracle those
with a solution, in the images that `play.py` has built (`trials.py`). Rows go to `--out`; a task
that has a row there is not played again.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl.cli.settings import registry_root, sandbox_environment
from prorl.sandbox.images.dockerfile import name_of
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.images.stack import WORKDIR_FILE
from prorl.sandbox.launch.spec import ENVIRONMENT_FILE

Row = dict[str, Any]
AGENTS = {"nop": "noop", "oracle": "reference"}
"""Harbor's agents, and what `play.py` calls their rewards."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--played", type=Path, required=True)
    parser.add_argument("--python", required=True, help="of an environment with harbor")
    parser.add_argument("--out", type=Path, default=Path("compared.jsonl"))
    parser.add_argument("--timeout-multiplier", type=float, default=1.0)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.played.read_text().splitlines()]
    compared = list(read_rows(arguments.out))
    done = {(row["path"], row["agent"]) for row in compared}
    jobs = [
        {"timeout_multiplier": arguments.timeout_multiplier, **job}
        for row in rows
        for job in jobs_of(row, done)
    ]
    expected = {
        (row["folder"], agent): row.get(key) for row in rows for agent, key in AGENTS.items()
    }
    for trial in run_jobs(arguments.python, jobs):
        ours = expected[trial["path"], trial["agent"]]
        compared.append({**trial, "ours": ours, "equal": is_equal(trial["rewards"], ours)})
        print(summary(compared[-1]), flush=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(compared[-1]) + "\n")
    num_equal = sum(row["equal"] for row in compared)
    print(f"{num_equal} of {len(compared)} rewards are equal")


def read_rows(path: Path) -> Iterator[Row]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def jobs_of(row: Row, done: set[tuple[str, str]]) -> Iterator[Row]:
    """The trials of a task that was built and played, but for those that are done: their images may
    be removed already.
    """
    folder = Path(row["folder"])
    if row.get("failure") or not row.get("noop"):
        return
    agents = [
        agent for agent, key in AGENTS.items() if row[key] and (str(folder), agent) not in done
    ]
    if agents:
        images = {str(each): image_of(each) for each in (folder / "environment", folder / "tests")}
        yield from ({"path": str(folder), "agent": agent, "images": images} for agent in agents)


def image_of(folder: Path) -> Row | None:
    """The image that was built from a folder, as `trials.py` takes it."""
    if not (folder / "Dockerfile").is_file():
        return None
    registry = Registry(registry_root(None))
    settings = sandbox_environment().build.model_dump(exclude_defaults=True)
    layers = registry.stack(registry.digest_of_name(name_of(folder, settings)))
    return described([Path(layer) for layer in layers])


def described(layers: list[Path]) -> Row:
    """An image by its folders, topmost first."""
    top = layers[0]
    environment = top / ENVIRONMENT_FILE
    lines = environment.read_text().splitlines() if environment.exists() else []
    pairs = [shlex.split(line.removeprefix("export ")) for line in lines]
    return {
        "layers": [str(layer) for layer in layers],
        "variables": dict(pair[0].split("=", 1) for pair in pairs if pair),
        "workdir": (top / WORKDIR_FILE).read_text().splitlines()[0],
    }


def run_jobs(python: str, jobs: list[Row]) -> Iterator[Row]:
    """Harbor's rows, as they come. Its own messages go to standard error."""
    script = Path(__file__).with_name("trials.py")
    with tempfile.TemporaryDirectory(prefix="harbor-") as folder:
        path = Path(folder, "jobs.json")
        path.write_text(json.dumps(jobs))
        argv = [python, str(script), str(path), f"{folder}/trials"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)


def is_equal(rewards: Row | None, ours: list[float | str]) -> bool:
    """A reward of ours that is a text is a failure, for which Harbor has no reward."""
    if rewards is None or "reward" not in rewards:
        return isinstance(ours[0], str)
    return isinstance(ours[0], float) and math.isclose(rewards["reward"], ours[0], abs_tol=1e-4)


def summary(row: Row) -> str:
    verdict = "equal" if row["equal"] else "DIFFERENT"
    rewards = f"harbor {row['rewards']}, prorl {row['ours']}"
    return f"{Path(row['path']).name} {row['agent']}: {verdict}: {rewards} {row['exception'][:200]}"


if __name__ == "__main__":
    main()
