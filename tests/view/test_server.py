"""Tests of whom the viewer answers, and of its pages of runs that are filtered, alive, damaged,
read-only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import orjson
import pytest

from prorl.analysis.annotations import annotate
from prorl.analysis.synthetic_runs import add_commit, make_run
from prorl.errors import NotFoundError, UserError
from prorl.storage.files.layout import MANIFEST
from prorl.types import Json
from prorl.view.opened import Opened, Question
from prorl.view.server import STATIC, Library
from prorl.view.tokens import Pieces, tokens
from tests.view.run_kinds import KINDS
from tests.view.viewer_process import viewing

REFUSED = {
    "no token": {"Authorization": ""},
    "another token": {"Authorization": "Bearer guess"},
    "a name that some DNS gave us": {"Host": "evil.example"},
    "a page of another site": {"Origin": "http://evil.example"},
    "a page of another port": {"Origin": "http://127.0.0.1:1"},
    "a link of another site": {"Sec-Fetch-Site": "cross-site"},
}


async def test_answers_our_own_page_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 16, 1)
    with viewing(tmp_path) as viewer:
        assert await viewer.ask("api/runs") == (200, {"runs": ["r"]})
        for what, headers in REFUSED.items():
            status, body = await viewer.ask("api/runs", headers)
            assert (status, list(body)) == (403, ["error"]), what
        for path in ("api/runs/none", "api/runs/r/rollouts/99", "api/runs/r/figures/x"):
            assert (await viewer.ask(path))[0] == 404, path
        for path in ("rows?limit=x", "rows?order=nope", "rows?where=1)+--", "sql?q=drop+table+x"):
            assert (await viewer.ask(f"api/runs/r/{path}"))[0] == 422, path


def test_a_page_of_rows_wherever_it_lies(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 400, 5)
    opened = Opened(str(tmp_path / "r"))
    page = opened.page(Question(), 390, 100)
    assert (page["total"], [row["rollout_id"] for row in page["rows"]]) == (400, [*range(390, 400)])
    slowest = opened.page(Question("reward > 0 -- so", "run_s", down=True), 0, 400)
    took = [row["run_s"] for row in slowest["rows"]]
    assert took == sorted(took, reverse=True)
    assert {row["reward"] for row in slowest["rows"]} == {1.0}
    ids = [row["rollout_id"] for row in slowest["rows"]]
    around = opened.neighbours(Question("reward > 0", "run_s", down=True), ids[7])
    assert around == {"at": 7, "of": len(ids), "before": ids[6], "after": ids[8]}
    for where in ("pg_sleep(1)", "1) union select * from read_text('/etc/passwd') --", "reward ="):
        with pytest.raises(UserError):
            opened.page(Question(where), 0, 1)


def test_facets_count_the_chosen_and_all(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 400, 2)
    facets = Opened(str(tmp_path / "r")).facets(Question("failure_code <> ''"))
    (turned,) = [row for row in facets if row["name"] == "failure_code"]
    assert turned["value"] == "max_turns"
    assert (turned["n"], turned["of"]) == (8, 8)


def test_follows_a_run_that_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 16, 2)
    library = Library.at(str(tmp_path))
    assert library.open("r").rows.num_rows == 16
    add_commit(run, 3, range(16, 32), 2, 64, np.random.default_rng(1))
    opened = library.open("r")
    assert opened.rows.num_rows == 32
    assert opened.page(Question("rollout_id > 29"), 0, 9)["total"] == 2
    assert opened.rollout(31)["rollout"]["rollout_id"] == 31


def test_a_kept_answer_counts_while_the_run_is_the_same(tmp_path: Path) -> None:
    run, sql = make_run(tmp_path / "r", 16, 1), "select count(*) as n from {}"
    opened = Opened(str(tmp_path / "r"))

    def counts() -> list[Json]:
        opened.refresh()
        tables = ("rollouts", "messages", "annotations")
        return [opened.answer(sql.format(table))[0]["n"] for table in tables]

    _, messages, _ = counts()
    assert counts() == [16, messages, 0]
    annotate(opened.stored, [{"rollout_id": 3, "label": "hack"}], author="tester")
    assert counts() == [16, messages, 1]
    add_commit(run, 2, range(16, 32), 2, 64, np.random.default_rng(1))
    assert counts() == [32, 2 * messages, 1]


def test_another_run_under_a_name_that_was_looked_at(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 16, 2)
    opened = Opened(str(tmp_path / "r"))
    assert opened.about()["totals"]["rollouts"] == 16
    shutil.rmtree(tmp_path / "r")
    make_run(tmp_path / "r", 24, 1)
    manifest = tmp_path / "r" / MANIFEST
    manifest.write_bytes(orjson.dumps(orjson.loads(manifest.read_bytes()) | {"code_version": "2"}))
    assert opened.refresh()
    assert opened.about()["totals"]["rollouts"] == 24
    assert opened.rollout(23)["messages"]


def test_names_a_damaged_part_and_shows_the_rest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 32, 2)
    parts = {file.table: file.path for commit in run.commits()[1:] for file in commit.files}
    for table in ("rollouts", "messages"):
        path = tmp_path / "r" / parts[table]
        content = bytearray(path.read_bytes())
        content[100 : len(content) // 3] = bytes(len(content) // 3 - 100)
        path.write_bytes(content)
    opened = Opened(str(tmp_path / "r"))
    assert list(opened.damaged) == [parts["rollouts"]]
    assert opened.page(Question(), 0, 99)["total"] == 16
    assert opened.figure("reward")["rows"]
    whole, broken = opened.rollout(3), opened.rollout(20)
    assert whole["messages"]
    assert not whole["damaged"]
    assert broken["turns"]
    assert parts["messages"] in broken["damaged"]["messages"]
    assert tokens(opened, Pieces("bytes"), 20)["sequences"]


def test_totals_of_a_run_with_rewards_that_are_no_numbers(tmp_path: Path) -> None:
    KINDS["odd"](tmp_path / "r")
    error = Opened(str(tmp_path / "r")).about()["totals"]["reward_error"]
    assert error > 0


async def test_a_sum_is_a_number(tmp_path: Path) -> None:
    """DuckDB gives a sum of integers as a decimal, which JSON has not."""
    make_run(tmp_path / "r", 4, 1)
    with viewing(tmp_path) as viewer:
        columns = "sum(num_turns)%20as%20turns,%20sum(num_turns)%20/%208::decimal%20as%20half"
        _, answer = await viewer.ask(f"api/runs/r/sql?q=select%20{columns}%20from%20rollouts")
    assert isinstance(answer["rows"][0]["turns"], int)
    assert isinstance(answer["rows"][0]["half"], float | int)


async def test_notes_stand_in_a_copy_and_in_its_sql(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 16, 1)
    shutil.copytree(tmp_path / "r", tmp_path / "disk" / "copy")
    with viewing(tmp_path / "disk" / "copy") as viewer:
        note = orjson.dumps({"rollout_id": 3, "label": "hack", "comment": "<b>"})
        status, reply = await viewer.ask("api/runs/copy/annotations", body=note)
        assert (status, reply["annotations"][0]["label"]) == (200, "hack")
        assert reply["annotations"][0]["author"] == "tester"
        rows_path = "api/runs/copy/rows?where=rollout_id+in+(select+rollout_id+from+annotations)"
        assert (await viewer.ask(rows_path))[1]["total"] == 1
        bad = await viewer.ask("api/runs/copy/annotations", body=b'{"rollout_id": 99}')
        assert bad[0] == 422


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && ! touch "$1/x" 2> /dev/null || exit 7
exec "$2" -c '
import sys
from prorl.analysis.annotations import annotate
from prorl.errors import ProrlError
from prorl.view.frozen import freeze
from prorl.storage.files.layout import MANIFEST
from prorl.types import Json
from prorl.view.opened import Opened, Question
opened = Opened(sys.argv[1] + "/r")
assert opened.page(Question("reward >= 0"), 0, 99)["total"] == 16
assert opened.rollout(3)["messages"] and "rollouts/3" in freeze(sys.argv[1] + "/r", [3])
try:
    annotate(opened.stored, [{"rollout_id": 3, "label": "x"}], author="a")
except (ProrlError, OSError) as error:
    assert "ead-only" in str(error), error
' "$1"
"""


def test_reads_a_disk_that_takes_no_writes(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 16, 1)
    script = ["sh", "-c", READ_ONLY, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(["unshare", "-rm", *script], capture_output=True, text=True, timeout=100)
    if done.returncode == 7 or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_spells_ids_individually() -> None:
    pieces = Pieces("bytes")
    text = "añ€😀<|im_end|>"
    ids = np.concatenate([np.frombuffer("añ€😀".encode(), np.uint8), [258]]).astype(np.int32)
    texts, at = pieces.spell(ids)
    assert "".join(texts[i] for i in at) == text
    assert len(at) == len(ids)
    assert Pieces("/nowhere").trouble
    assert Pieces("/nowhere").spell(ids[:1]) == (["‹97›"], [0])
    assert "\N{REPLACEMENT CHARACTER}" in pieces.spell(np.array([0xFF, 65], np.int32))[0]


async def test_tells_of_a_live_run_when_it_has_grown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", 16, 2)
    with viewing(tmp_path) as viewer, anyio.fail_after(60):
        async with viewer.events("api/runs/r/events") as events:
            first = await anext(events)
            assert first["totals"]["rollouts"] == 16
            assert "no service" in first["silent"]
            add_commit(run, 3, range(16, 32), 2, 64, np.random.default_rng(1))
            assert (await anext(events))["totals"]["rollouts"] == 32


def test_refuses_a_place_without_runs(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run in"):
        Library.at(str(tmp_path))


def test_no_script_parses_text_as_html() -> None:
    parsing = re.compile(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|srcdoc")
    scripts = [*STATIC.glob("*.js")]
    assert len(scripts) > 4
    assert [path.name for path in scripts if parsing.search(path.read_text())] == []
