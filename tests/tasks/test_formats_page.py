"""The table of formats in docs/tasks.md is the catalogue, and every container gives the same."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl.tasks import read_tasks
from prorl.tasks.formats import formats
from prorl.types import Json

PAGE = Path(__file__).parents[2] / "docs/tasks.md"
ASK = [{"role": "user", "content": "1+1?"}]
ROWS: dict[str, Json] = {
    "answers": {"prompt": "1+1?", "answer": "2"},
    "gsm8k": {"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"},
    "verl": {"prompt": ASK, "data_source": "x", "reward_model": {"ground_truth": "2"}},
    "nemo_gym": {"responses_create_params": {"input": ASK}, "expected_answer": "2"},
    "choices": {"question": "1+1?", "choices": ["1", "2"], "answer": "B"},
}


def _parquet(path: Path, rows: list[Json]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path / "a.parquet")
    return path / "a.parquet"


def _saved(path: Path, rows: list[Json]) -> Path:
    table = pa.Table.from_pylist(rows)
    with (
        (path / "data-00000-of-00001.arrow").open("wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    (path / "state.json").write_text('{"_data_files": []}')
    return path


def _file(name: str, pack: Callable[[bytes], bytes]) -> Callable[[Path, list[Json]], Path]:
    def write(path: Path, rows: list[Json]) -> Path:
        (path / name).write_bytes(pack(b"".join(orjson.dumps(row) + b"\n" for row in rows)))
        return path / name

    return write


CONTAINERS: dict[str, Callable[[Path, list[Json]], Path]] = {
    "JSON Lines": _file("a.jsonl", bytes),
    "gzip": _file("a.jsonl.gz", gzip.compress),
    "a JSON list": _file("a.json", lambda lines: b"[" + b",".join(lines.splitlines()) + b"]"),
    "Parquet": _parquet,
    "a saved folder": _saved,
}


def test_the_page_lists_the_catalogue() -> None:
    section = PAGE.read_text().partition("\n## Formats\n")[2].partition("\n## ")[0]
    lines = [line.replace("\\|", "/") for line in section.splitlines()]
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    listed = [(row[0], row[1].replace("/", "|")) for row in table if row[0] != "format"]
    assert listed == [(entry.name, ", ".join(entry.keys)) for entry in formats()]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_detected_in_every_container_and_reported(
    tmp_path: Path, name: str, container: str
) -> None:
    loaded = read_tasks(CONTAINERS[container](tmp_path, [ROWS[name]]))
    assert loaded.format == name
    assert f"1 task, read as {name}, for the env {loaded.tasks[0].env}" in loaded.about
    assert loaded.tasks[0].data["answer"] in ("2", "B", 1)
