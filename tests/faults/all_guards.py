"""Every line that `docs/guarantees.md` names is switched off, one at a time, in a copy of the tree,
and a test that its row names must fail there. Hours: `make test-guards-all`.

    .venv/bin/python -m pytest -s tests/faults/all_guards.py -k bearer

`PRORL_GUARDS_SAMPLE=10:7` takes ten of them, drawn by seed 7. How a line is switched off says
`guarantees.py`; where its own way says nothing, `BY_HAND` does. The lines that `test_guards.py` has
are switched off there.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.guarantees import PAGE, Place, places, pytest_arguments, rows
from tests.faults.test_guards import COPIED, FAILED, ROOT

pytestmark = pytest.mark.timeout(3600)

BY_HAND: dict[str, tuple[str, str]] = {
    "exit_code != 0 or reward is None": ("exit_code != 0 or reward is None", "reward is None"),
    "key not in others": ("key not in others and ref.sandbox_id", "ref.sandbox_id"),
    "self.digest_of_name(name), (name,)": (
        "return self.image(self.digest_of_name(name), (name,))",
        "return next(image for image in self.list() if name in image.names)",
    ),
    "isinstance(env, _Closed) or task.env in BUILT_IN": (
        "(isinstance(env, _Closed) or task.env in BUILT_IN)",
        "isinstance(env, _Closed)",
    ),
    "end = EventKind.RETURN if worker.remote": (
        "end = EventKind.RETURN if worker.remote else EventKind.LOST",
        "end = EventKind.LOST",
    ),
    "calls.CLONE_NEWPID": ("    | calls.CLONE_NEWPID\n", ""),
}
"""By the words of the page: what is replaced, and by what."""


def _cases() -> list[tuple[str, list[Place], list[list[str]]]]:
    found = []
    for row in rows(PAGE.read_text()):
        for words, there in places(row):
            if there:
                name = f"{row.guarantee[:60]} [{words}]"
                found.append((name, there, pytest_arguments(row)))
    sample = os.environ.get("PRORL_GUARDS_SAMPLE", "")
    if sample:
        count, _, seed = sample.partition(":")
        found = random.Random(int(seed or 0)).sample(found, int(count))
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guards")
    for name in (*COPIED, "docs", "Makefile", "README.md"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def switched_off(text: str, place: Place) -> str:
    if place.words in BY_HAND:
        line, off = BY_HAND[place.words]
        assert line in text, line
        return text.replace(line, off)
    return text[: place.start] + place.off + text[place.stop :]


@pytest.mark.parametrize(("name", "there", "tests"), CASES, ids=[case[0] for case in CASES])
def test_a_test_fails_without(
    copy: Path, name: str, there: list[Place], tests: list[list[str]]
) -> None:
    changed: dict[Path, str] = {}
    for place in sorted(there, key=lambda place: -place.start):  # the later ones do not move
        path = copy / place.file
        text = path.read_text()
        changed.setdefault(path, text)
        path.write_text(switched_off(text, place))
    try:
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PRORL_POWER_CUTS": "60",
        }
        argv = [sys.executable, "-m", "pytest", "-qx", "-m", "", "-p", "no:cacheprovider"]
        failed: list[str] = []
        for words in tests:
            ran = subprocess.run(
                [*argv, *words], cwd=copy, env=environment, capture_output=True, text=True
            )
            # A tree that cannot be imported or collected (other statuses) shows no test that fails.
            assert ran.returncode in (0, 5, FAILED), ran.stdout[-3000:]
            if ran.returncode == FAILED:
                lines = ran.stdout.splitlines()
                failed = [line for line in lines if line.startswith("FAILED")]
                assert failed, ran.stdout[-3000:]
                break
        print(f"\n{name}: off -> {failed}", file=sys.stderr)
        assert failed, f"{tests} pass without {there}"
    finally:
        for path, text in changed.items():
            path.write_text(text)
