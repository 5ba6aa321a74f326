"""Task folders: one task a folder, or a folder of such folders.

They are Harbor's (`task.toml`, `instruction.md`) and terminal-bench's before it (`task.yaml`):

    task.toml | task.yaml     limits; of terminal-bench the instruction, too
    instruction.md            what the policy is asked
    environment/Dockerfile    its image: `prorl image build NAME --from FOLDER` makes it
    tests/                    test.sh (run-tests.sh beside it in terminal-bench) tells the reward
    solution/solve.sh         for oracles (solution.sh in terminal-bench)

The tests stay in the folder until EVAL reads them there, so the folder must be on every node.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from prorl.errors import TaskError
from prorl.types import DOCKER, Json, Task

TOML, YAML = "task.toml", "task.yaml"


def is_task_folder(path: Path) -> bool:
    """Whether a folder is a task, or holds some."""
    return path.is_dir() and any(True for _ in find(path))


def find(path: Path) -> Iterator[Path]:
    if _about(path):
        yield path
        return
    yield from sorted(each for each in path.iterdir() if each.is_dir() and _about(each))


def _about(folder: Path) -> Path | None:
    return next((folder / name for name in (TOML, YAML) if (folder / name).is_file()), None)


def read_folder(folder: Path) -> Task:
    """One task. Raises TaskError without a place."""
    about = _about(folder)
    assert about is not None
    import yaml  # here: a trainer's image, which reads other task files, has it not

    try:
        text = about.read_text()
        table: Json = tomllib.loads(text) if about.name == TOML else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as cause:
        raise TaskError(f"{about.name} cannot be read ({cause})", "a task's table") from cause
    if not isinstance(table, dict):
        raise TaskError(f"{about.name} is no table", "a task's table")
    fields = _harbor(folder, table) if about.name == TOML else _terminal_bench(folder, table)
    prompt = fields.pop("prompt")
    if not prompt.strip():
        raise TaskError("it has no instruction", "instruction.md, or `instruction` in task.yaml")
    if not (folder / fields["test"]).is_file():
        raise TaskError(f"it has no {fields['test']}", "what tells the reward")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", folder.name)
    image = fields.pop("image") or name[:120]
    data = {"folder": str(folder.absolute()), "image": image, **fields}
    return Task(task_id=name, env="harbor", prompt=prompt, data=data, data_source="harbor")


def _harbor(folder: Path, table: dict[str, Json]) -> dict[str, Json]:
    verifier, environment = _table(table, "verifier"), _table(table, "environment")
    instruction = folder / "instruction.md"
    try:
        prompt = instruction.read_text() if instruction.is_file() else ""
    except (OSError, ValueError) as cause:
        raise TaskError(f"instruction.md cannot be read ({cause})", "a text") from cause
    named = environment.get("docker_image")
    found = {
        "prompt": prompt,
        "image": f"{DOCKER}{named}" if isinstance(named, str) and named else "",
        "test": "tests/test.sh",
        "solution": "solution/solve.sh",
        "timeout_s": _seconds(verifier.get("timeout_sec"), 600.0),
        "environment": _table(verifier, "env"),
    }
    sized = {"memory_bytes": environment.get("memory_mb"), "overlay": environment.get("storage_mb")}
    if isinstance(memory := sized["memory_bytes"], int):
        found["sandbox"] = {"memory_bytes": memory << 20}
    return found


def _terminal_bench(folder: Path, table: dict[str, Json]) -> dict[str, Json]:
    return {
        "prompt": str(table.get("instruction") or ""),
        "image": "",
        "test": "run-tests.sh",
        "solution": "solution.sh",
        "timeout_s": _seconds(table.get("max_test_timeout_sec"), 180.0),
        "environment": {},
    }


def _table(table: dict[str, Json], name: str) -> dict[str, Json]:
    found = table.get(name) or {}
    if not isinstance(found, dict):
        raise TaskError(f"{name} is {str(found)[:60]}", "a table")
    return found


def _seconds(value: Json, default: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if good else default
