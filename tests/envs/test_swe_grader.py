"""The grader of `swe`: every right solution scores 1, however it is written, and what is forged 0.

The tables are `swe_right.py` and `swe_forged.py`, over the ten repositories of
`swe_repositories.py`; the slow suite tries each row with each, the fast one a sample.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import count, cycle
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import pytest_asyncio

from prorl.envs.swe import SweEnv, change_grader
from prorl.envs.swe.shell import ARTIFACT, BASE, DIFF
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.spawn import spawned
from prorl.testing import LocalSandbox
from prorl.types import Score, Stage, Task
from tests.envs.swe_forged import EVERYWHERE, EVIL, FILES, LIARS, LINKS, READERS
from tests.envs.swe_repositories import (
    FLOATS,
    HELPED,
    NUMBERS,
    REPOSITORIES,
    TEXTS,
    Repository,
    diff,
)
from tests.envs.swe_right import STYLES

ENV = SweEnv()
CORE = "src/pkg/core.py"
CHEATS = {**EVERYWHERE, **LIARS, **READERS}
FOOLED = {
    "a difference of nothing": FLOATS,
    "is expected to fail": NUMBERS,
    "reads the caller's source": HELPED,
}
"""Repositories of which a cheat passes the tests themselves."""
SAID = ("calls no test", "reads the caller's source")
"""Cheats of which the fast suite asserts more: `test_a_forgery_says_so_in_a_part_and_in_the_log`."""
NUMBERS_OF = count()

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(sandbox_kind: str) -> AsyncIterator[UnixSandboxHost]:
    async with spawned(sandbox_kind) as (host, _):
        yield host


async def _score(host: UnixSandboxHost, task: Task, artifact: bytes) -> Score:
    spec = ENV.sandbox(task, Stage.EVAL)
    assert spec is not None
    ref = await host.start(f"grade/{next(NUMBERS_OF)}/1", "eval", spec)
    async with host.connect(ref) as sandbox:
        await ENV.prepare(task, sandbox)
        score = await ENV.score(task, artifact, sandbox, Deadline(120.0))
    await host.stop(ref)
    return score


def _change(repository: Repository, text: str, row: str) -> bytes:
    """A change of the module to this text, with a row of the tables behind."""
    return diff({CORE: (repository.wrong, text + repository.changed(row))}).encode()


def _rows(table: dict[str, str], stride: int) -> list[object]:
    """Each row with each repository; the fast suite takes one for some rows, in turn."""
    turn = cycle(REPOSITORIES)
    rows: list[object] = []
    for row, name in enumerate(table):
        next_repository = next(turn)
        fast = FOOLED.get(name, HELPED if name in LIARS else next_repository)
        for repository in REPOSITORIES:
            is_fast = repository is fast and row % stride == 0 and name not in SAID
            marks = () if is_fast else pytest.mark.slow
            rows.append(pytest.param(repository, name, id=f"{repository.name}-{name}", marks=marks))
    return rows


@pytest.mark.parametrize(("repository", "style"), _rows(STYLES, 9))
async def test_right_solutions_count(
    host: UnixSandboxHost, repository: Repository, style: str
) -> None:
    change = _change(repository, repository.right, STYLES[style])
    score = await _score(host, repository.task(), change)
    assert score.reward == 1, score.log


@pytest.mark.parametrize(("repository", "name"), _rows(CHEATS, 6))
async def test_what_is_forged_earns_nothing(
    host: UnixSandboxHost, repository: Repository, name: str
) -> None:
    score = await _score(
        host, repository.task(), _change(repository, repository.wrong, CHEATS[name])
    )
    assert score.reward == 0, score.log


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        (NUMBERS, "calls no test"),
        pytest.param(FLOATS, "a number that equals everything", marks=pytest.mark.slow),
        pytest.param(NUMBERS, "a number that equals numbers below 2 ** 60", marks=pytest.mark.slow),
        (HELPED, "reads the caller's source"),
    ],
)
async def test_a_forgery_says_so_in_a_part_and_in_the_log(
    host: UnixSandboxHost, repository: Repository, name: str
) -> None:
    score = await _score(
        host, repository.task(), _change(repository, repository.wrong, CHEATS[name])
    )
    values = {part.name: part.value for part in score.parts}
    assert values["forged"] > 0, score.log
    assert score.reward == values["resolved"] == 0
    assert values["fail_to_pass"] == 1
    assert "pass whatever they expect: " in score.log


@pytest.mark.parametrize("fix", [True, False])
async def test_deciding_files_are_excluded_and_a_fix_counts_beside_them(
    host: UnixSandboxHost, fix: bool
) -> None:
    files = {path: text for rows in FILES.values() for path, text in rows.items()}
    have = HELPED.task().data["files"] | NUMBERS.task().data["files"]
    text = NUMBERS.right if fix else NUMBERS.wrong + "\n"
    task = NUMBERS.task(files=have)
    change = diff({path: (have.get(path), new) for path, new in files.items()})
    score = await _score(host, task, change.encode() + _change(NUMBERS, text, ""))
    assert score.reward == float(fix), score.log
    assert "left out of the change: " in score.log


FAST_LINKS = ("sitecustomize as a link to a folder", "the tests' folder as a link")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "repository", [NUMBERS, TEXTS, HELPED], ids=lambda repository: repository.name
)
async def test_no_file_that_decides_counts_alone(
    host: UnixSandboxHost, repository: Repository, name: str
) -> None:
    task = repository.task()
    have = task.data["files"]
    change = diff({path: (have.get(path), new) for path, new in FILES[name].items()})
    assert (await _score(host, task, change.encode())).reward == 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST_LINKS else pytest.mark.slow) for name in LINKS],
)
async def test_links_that_decide_do_not_count(
    host: UnixSandboxHost, name: str, tmp_path: Path
) -> None:
    task = NUMBERS.task()
    for path, text in task.data["files"].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for script in (
        f"set -e\n{BASE}",
        LINKS[name].replace("EVIL", EVIL.replace("'", '"')),
        ARTIFACT,
    ):
        subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    score = await _score(host, task, (tmp_path / DIFF).read_bytes())
    assert score.reward == 0, score.log
    assert "left out of the change: " in score.log


USELESS = NUMBERS._replace(
    name="useless",
    new='\n\ndef test_thousands():\n    parse("1,234")\n',
    failing=("test_thousands",),
)
"""Its hidden test says no more than that nothing is raised: the reference passes its twin."""


async def test_a_twin_that_the_reference_passes_says_nothing(host: UnixSandboxHost) -> None:
    for style in ("plain", "wildcard classes"):
        change = _change(USELESS, USELESS.right, STYLES[style])
        assert (await _score(host, USELESS.task(), change)).reward == 1


READS_ITSELF = NUMBERS._replace(
    name="reads-itself",
    new='\n\ndef test_thousands():\n    assert parse("1,234") == 1234  # so\n'
    '    assert "1234  # " + "so" in open(__file__).read()\n',
    failing=("test_thousands",),
)
"""Its hidden test fails when it is rewritten, whatever the solution."""


async def test_a_row_with_a_reference_that_fails_under_rewritten_files_keeps_its_own(
    host: UnixSandboxHost,
) -> None:
    for repository, has_own in ((READS_ITSELF, True), (NUMBERS, False)):
        change = _change(repository, repository.right, "")
        score = await _score(host, repository.task(), change)
        assert score.reward == 1, score.log
        assert ("own_files" in {part.name for part in score.parts}) is has_own


@pytest.mark.slow
async def test_a_repository_that_mends_its_own_assertions_may_change_them(
    host: UnixSandboxHost,
) -> None:
    """The reference is in `pkg/testing.py`: what a change does there counts, and is not rewritten."""
    wrong = "def assert_same(actual, desired):\n    assert actual == desired\n"
    right = "def assert_same(actual, desired):\n    assert list(actual) == list(desired)\n"
    other = (
        "def assert_same(actual, desired):\n"
        "    if [*actual] != [*desired]:\n        raise AssertionError(actual)\n"
    )
    files = {**HELPED.files, "src/pkg/testing.py": wrong}
    new = "\n\ndef test_kinds():\n    assert_same((1, 2), [1, 2])\n"
    own = HELPED._replace(files=files, new=new, failing=("test_kinds",))
    task = own.task(patch=diff({"src/pkg/testing.py": (wrong, right)}))
    for text, reward in ((right, 1), (other, 1), ("def assert_same(a, b): pass\n", 0)):
        change = diff({"src/pkg/testing.py": (wrong, text)}).encode()
        score = await _score(host, task, change)
        assert score.reward == reward, score.log


async def test_settings_of_the_runner_may_be_the_references(host: UnixSandboxHost) -> None:
    settings = '[tool.pytest.ini_options]\naddopts = "-q"\n'
    files = {**NUMBERS.task().data["files"], "pyproject.toml": settings}
    mended = settings.replace("-q", "-q -ra")
    patch = diff({CORE: (NUMBERS.wrong, NUMBERS.right), "pyproject.toml": (settings, mended)})
    task = NUMBERS.task(files=files, patch=patch)
    evil = diff({"pyproject.toml": (settings, settings.replace("-q", "--collect-only"))})
    fix = _change(NUMBERS, NUMBERS.right, "")
    for change in (patch.encode(), evil.encode() + fix, fix):
        assert (await _score(host, task, change)).reward == 1


async def test_a_run_begins_as_the_first_run_did(
    host: UnixSandboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that leaves a mark in its first run and forges only where there is none."""
    mark = """
import os
places = ["mark", "/tmp/mark", "/dev/shm/mark"]
if not any(map(os.path.exists, places)):
    for place in places:
        open(place, "w").close()
"""
    forges = EVERYWHERE["calls no test"].replace("\n", "\n    ")
    monkeypatch.setattr(change_grader, "shuffled", list)  # the run that counts comes first
    score = await _score(
        host, NUMBERS.task(), _change(NUMBERS, NUMBERS.wrong, f"{mark}    {forges.strip()}\n")
    )
    assert score.reward == 0, score.log
    assert "pass whatever they expect: " in score.log


class Stalled:
    """A sandbox that is never made fresh for a further run."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def restore(self, path: str) -> None:
        await asyncio.sleep(1000.0)


@pytest.mark.slow
async def test_a_right_change_is_not_lost_to_twins_that_have_no_time(
    host: UnixSandboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, change = TEXTS.task(), _change(TEXTS, TEXTS.right, "")
    await _score(host, task, change)  # what is true of the task is known
    monkeypatch.setattr(change_grader, "shuffled", list)  # the run that counts comes first
    monkeypatch.setattr(change_grader, "RUNNER_S", 0.0)
    monkeypatch.setattr(change_grader, "SLOWER_S", 1000.0)  # on a busy machine, too
    spec = ENV.sandbox(task, Stage.EVAL)
    assert spec is not None
    ref = await host.start("grade/stalled/1", "eval", spec)
    async with host.connect(ref) as sandbox:
        await ENV.prepare(task, sandbox)
        score = await ENV.score(task, change, cast(Sandbox, Stalled(sandbox)), Deadline(40.0))
    await host.stop(ref)
    assert score.reward == 1, score.log


# ---- the twin itself


HEAD = '"""Text."""\nfrom __future__ import annotations\nimport pytest, unittest\n'
HEAD += "from pkg.core import f\n\n\nclass TestIt(unittest.TestCase):\n"
LINES = [
    "assert f(4) == 4",
    "assert 4 == f(4)",
    "assert f(4) == 2 + 2",
    "assert f([1, {'a': None}]) == [1, {'a': None}]",
    "assert f(()) == () and f('') == ''",
    "assert f(True)",
    "assert not f(0)",
    "assert f(4) > 3",
    "assert f(4) != 5",
    "assert f(4) in (3, 4)",
    "assert 'x' in f('xy')",
    "assert f(4) is not None",
    "assert f(1.5) == pytest.approx(1.4, abs=0.2)",
    "assert f(1) == 1 or f(2) == 1",
    "self.assertEqual(f(4), 4)",
    "self.assertEqual(f(4), f(4))",
    "self.assertAlmostEqual(f(4), 4.2, delta=0.5)",
    "self.assertTrue(f(4) == 4)",
    "self.assertFalse(f(0))",
    "self.assertIn('x', f('xy'))",
    "self.assertIn(f(1), [1, 2])",
    "self.assertNotIn(1, f([2]))",
    "self.assertLess(f(4), 5)",
    "self.assertLessEqual(f(4), 4)",
    "self.assertIsNone(f(None))",
    "self.assertNotEqual(f(4), 5)",
    "self.assertIsInstance(f(4), int)",
    "self.assertRegex(f('xy'), '^x')",
    "with pytest.raises(ZeroDivisionError): f(1) / 0",
    "self.assertRaises(TypeError, f)",
    "with self.assertRaisesRegex(TypeError, 'f'): f()",
    "if f(4) != 4: self.fail('no')",
    "if not f(4): raise AssertionError",
    "expected = [4]; assert f([4]) == expected, expected",
    "for a, b in [(1, 1)]: assert f(a) == b",
]


async def test_each_assertion_has_a_twin_that_honest_work_fails(tmp_path: Path) -> None:
    tests = [f"    def test_{number}(self):\n        {line}\n" for number, line in enumerate(LINES)]
    names = [f"test_it.py::TestIt::test_{number}" for number in range(len(LINES))]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rp"]
    folder = tmp_path
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/core.py").write_text("def f(x): return x\n")
    other = "    def test_other(self):\n        assert f(1) == 1\n"
    text = HEAD + "".join([*tests, other])
    sandbox = LocalSandbox(folder)
    job: dict[str, Any] = {
        "seed": "a",
        "draw": "b",
        "closed": [],
        "watch": "",
        "names": names,
        "folders": [],
    }
    job |= {"beside": True, "graded": ["test_it.py"], "side": [], "without": []}

    async def rewritten(turn: int) -> dict[str, Any]:
        (folder / "test_it.py").write_text(text)
        argv = ["python3", "-I", "-c", change_grader.program()]
        done = await sandbox.exec(argv, 20.0, orjson.dumps({**job, "turn": turn}))
        return dict(orjson.loads(done.output))

    report = await rewritten(-1)
    assert (report["altered"], report["draws"]) == (0, 2)
    plain = (folder / "test_it.py").read_text()
    assert f"{len(LINES) + 1} passed" in (await sandbox.exec(argv, 60.0)).output
    for turn in range(report["draws"]):
        assert (await rewritten(turn))["altered"] == len(LINES)
        # nothing but values tells a twin from the run that counts: no call, no name, no line
        after = (folder / "test_it.py").read_text()
        assert after.count("_alter(") == plain.count("_alter(")
        assert len(after.splitlines()) == len(plain.splitlines())
        done = await sandbox.exec(argv, 60.0)
        assert f"{len(LINES)} failed, 1 passed" in done.output, done.output
