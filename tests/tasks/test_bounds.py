"""Task rows at and above each bound: what is at it is taken, and one more is refused in a line.

Each row of the table is a bound, how something of a size is given, and what the refusal says.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl.config import RunConfig
from prorl.envs import get_env, harbor
from prorl.envs.answers.grade import MAX_REFERENCE_CHARS as MAX_GRADED_CHARS
from prorl.envs.answers.grade import grade
from prorl.envs.math import MAX_REFERENCE_CHARS
from prorl.errors import TaskError
from prorl.renderer.apart import check_fits
from prorl.service.core.candidates import (
    MAX_EXTRA_BYTES,
    MAX_TASK_BYTES,
    GroupBody,
    GroupsBody,
    candidate_of,
)
from prorl.task_json import task_from_json, task_to_json
from prorl.tasks import load_tasks
from prorl.tasks.formats import programs
from prorl.tasks.generated import MAX_TASKS, distinct
from prorl.tasks.rows import TASK_DEPTH
from prorl.types import Json, Task

RUN = RunConfig(run_id="r", filter="none")
EMPTY = Task(task_id="a", env="noop", prompt="")


def submit(task: Task = EMPTY, **more: Json) -> None:
    candidate_of(GroupBody(task=task, **more), RUN, "{}", "groups[0]")


def nested(levels: int) -> Json:
    value: Json = []
    for _ in range(levels - 1):
        value = [value]
    return value


def with_prompt(letter: str) -> Callable[[int], None]:
    """Submits a task of so many bytes of JSON, its prompt of this letter."""
    least, width = len(task_to_json(EMPTY)), len(letter.encode())

    def submit_prompt(num_bytes: int) -> None:
        count, rest = divmod(num_bytes - least, width)
        submit(Task(task_id="a", env="noop", prompt=letter * count + "a" * rest))

    return submit_prompt


def with_data(levels: int) -> None:
    """Submits a task whose JSON has so many levels: its own, that of `data`, and a value's."""
    submit(Task(task_id="a", env="noop", prompt="", data={"x": nested(levels - 2)}))


def with_cases(num_bytes: int) -> None:
    """Submits a task of code whose cases make up its size."""
    cases = [{"input": "1 2\n", "output": "3\n"}] * 20_000
    task = Task(task_id="a", env="code", prompt="Add.", data={"cases": cases})
    room = num_bytes - len(task_to_json(task))
    cases = [*cases[1:], {"input": "1 2\n", "output": "3\n" + "x" * room}]
    task = Task(task_id="a", env="code", prompt="Add.", data={"cases": cases})
    get_env("code").check(task)
    submit(task)


def of_math(length: int) -> None:
    task = Task(task_id="a", env="math", prompt="?", data={"answer": "1" * length})
    get_env("math").check(task)


def to_grade(length: int) -> None:
    why = grade("1" * length, "1", "", is_step=False)[1]
    assert "too long" not in why, why


def read_lines(folder: Path, depth: int) -> None:
    """Reads Harbor's task folders that lie so deep below a folder."""
    task = folder.joinpath(*"abcdef"[:depth], "one")
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.")
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "debian"\n')
    (task / "tests" / "test.sh").write_text("true\n")
    load_tasks(folder)


class Bound(NamedTuple):
    value: int
    give: Callable[[int], object]
    refusal: str


BOUNDS = {
    "bytes of a task": Bound(MAX_TASK_BYTES, with_prompt("a"), "takes 4,194,305 bytes"),
    "bytes of a task in another script": Bound(
        MAX_TASK_BYTES, with_prompt("\u6f22"), "takes 4,194,305 bytes"
    ),
    "bytes of a task with its cases": Bound(MAX_TASK_BYTES, with_cases, "takes 4,194,305 bytes"),
    "levels of data": Bound(254, with_data, "at most 254 levels"),
    "levels of data that is read": Bound(
        252, lambda n: task_to_json(task_from_json(json.dumps(_row(n)))), "at most 254 levels"
    ),
    "bytes of extra": Bound(
        MAX_EXTRA_BYTES, lambda n: submit(extra={"x": "a" * (n - 8)}), "`extra` takes 262,145"
    ),
    "levels of extra": Bound(
        254, lambda n: submit(extra={"x": nested(n - 1)}), "at most 254 levels"
    ),
    "letters of a key": Bound(512, lambda n: submit(key="k" * n), "at most 512"),
    "letters of a task's id": Bound(
        512, lambda n: GroupBody.model_validate({"task": _row(1, "a" * n)}), "at most 512"
    ),
    "rollouts of a group": Bound(1024, lambda n: submit(n=n), "less than or equal to 1024"),
    "groups of a body": Bound(
        10_000,
        lambda n: GroupsBody(groups=[GroupBody(task=EMPTY)] * n),
        "at most 10000 items",
    ),
    "bytes of a prompt": Bound(4 * 1000, lambda n: check_fits(n, 4, 1000), "at most 4,000"),
    "letters of an answer of math": Bound(MAX_REFERENCE_CHARS, of_math, "the reference answer"),
    "letters of a reference that is graded": Bound(MAX_GRADED_CHARS, to_grade, "too long"),
    "tasks of a generated set": Bound(
        MAX_TASKS, lambda n: distinct(n, random.Random(0), _draw), "at most 200000"
    ),
}


def _row(levels: int, task_id: str = "a") -> dict[str, Json]:
    return {"task_id": task_id, "env": "noop", "prompt": "", "data": {"x": nested(levels)}}


def _draw(rng: random.Random, index: int) -> Task:
    return Task(task_id=str(index), env="noop", prompt=str(index))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_value_at_its_bound_is_accepted_and_a_larger_value_is_refused(name: str) -> None:
    bound = BOUNDS[name]
    bound.give(bound.value)
    with pytest.raises((ValueError, AssertionError)) as caught:
        bound.give(bound.value + 1)
    assert bound.refusal in str(caught.value), str(caught.value)[:500]


def test_folders_of_tasks_are_looked_for_so_deep(tmp_path: Path) -> None:
    read_lines(tmp_path / "at", TASK_DEPTH - 1)
    with pytest.raises(ValueError, match="is a directory with no task file"):
        read_lines(tmp_path / "above", TASK_DEPTH)


def test_cases_are_unpacked_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that was packed a thousand to one is not unpacked beyond its bound."""
    packed = pickle.dumps(json.dumps([{"input": "0" * 100_000, "output": "0"}]))
    value = base64.b64encode(zlib.compress(packed)).decode()
    monkeypatch.setattr(programs, "MAX_UNPACKED_BYTES", len(packed))
    assert programs._private(value)
    monkeypatch.setattr(programs, "MAX_UNPACKED_BYTES", len(packed) - 1)
    with pytest.raises(TaskError, match="private_test_cases cannot be read"):
        programs._private(value)


# ---- a folder of a Harbor task, which passes through memory


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ("small", ""),
        ("packed", "more than 0 MiB, packed"),
        ("unpacked", "more than 1024 MiB"),
        ("fan", "more than 100 files"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_a_folder_is_packed_up_to_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, refusal: str
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test.sh").write_bytes(random.Random(0).randbytes(100_000))
    match content:
        case "packed":
            monkeypatch.setattr(harbor, "MAX_FOLDER_BYTES", 99_000)
        case "unpacked":
            os.truncate(folder / "test.sh", harbor.MAX_UNPACKED_BYTES + 1)  # a hole
        case "fan":  # of 25 folders two links each: 16 million files behind them
            monkeypatch.setattr(harbor, "MAX_FOLDER_ENTRIES", 100)
            for level in range(24):
                (tmp_path / str(level)).mkdir()
                (tmp_path / str(level) / "one").symlink_to(f"../{level + 1}")
                (tmp_path / str(level) / "two").symlink_to(f"../{level + 1}")
            (tmp_path / "24").mkdir()
            (folder / "first").symlink_to("../0")
        case "loop":
            (folder / "itself").symlink_to("itself")
    if not refusal:
        assert harbor._packed([(folder, ".")])
        return
    with pytest.raises(Exception, match=refusal) as caught:
        harbor._packed([(folder, ".")])
    assert str(folder) in str(caught.value)
