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

BY_HAND: dict[str, list[tuple[str, str]]] = {
    "exit_code != 0 or reward is None": [("exit_code != 0 or reward is None", "reward is None")],
    "diff_id": [('f"sha256:{stream.digest.hexdigest()}" != diff_id', "False")],
    "self.digest_of_name(name), (name,)": [
        (
            "return self.image(self.digest_of_name(name), (name,))",
            "return next(image for image in self.list() if name in image.names)",
        )
    ],
    "isinstance(env, _UnopenedEnv) or task.env in BUILT_IN": [
        ("(isinstance(env, _UnopenedEnv) or task.env in BUILT_IN)", "isinstance(env, _UnopenedEnv)")
    ],
    "end = EventKind.RETURN if worker.remote": [
        ("end = EventKind.RETURN if worker.remote else EventKind.LOST", "end = EventKind.LOST")
    ],
    "if authorization and is_first": [("if authorization and is_first", "if authorization")],
    "capped": [
        ("spec.allowed_hosts), self._most)", 'spec.allowed_hosts), NetworkPolicy("public"))')
    ],
    "calls.CLONE_NEWPID": [("    | calls.CLONE_NEWPID\n", "")],
    "knows": [("= self._flying.knows(key) or self._waiting.knows(key)", "= None")],
    "there.get(candidate.key) or run.keys.get(candidate.key)": [
        ("= there.get(candidate.key) or run.keys.get(candidate.key)", "= None")
    ],
    "account.has(needs)": [
        ("self._consumers.values() if account.has(needs)", "self._consumers.values()"),
        (" < account.window_bytes and account.has(needs)", " < account.window_bytes"),
    ],
    "account.rows > 0": [("account.rows > 0 < account.window_bytes", "account.window_bytes > 0")],
    "path not in named": [("[path for path in orphans if path not in named]", "orphans")],
    "doubtful": [("= self._journal.begin_call()", "= self._journal.begin_call() and False")],
    "worker.status.leaving": [
        (" and not worker.status.leaving", ""),
        ("end = EventKind.RETURN if worker.status.leaving else end", "pass"),
    ],
    "jwt.decode": [('{"require": ["grant"]}', '{"verify_signature": False}')],
    "LIE_SHARE": [("else LIE_SHARE", "else ERROR_SHARE")],
    "if ticket.layout ==": [
        ('ROUTING if ticket.layout == "routed_experts" else _shape', "_shape"),
        (
            "_routing(run, reply)\n"
            '                if ticket.layout == "routed_experts"\n'
            "                else [",
            "[",
        ),
    ],
    "partial.part": [("if partial.part is not None and len(partial.part.token_ids_C)", "if False")],
    "self._leased.pop": [
        ("lease = self._leased.pop(lease_id, None)", "lease = self._leased.get(lease_id)"),
        ("self._leased.pop(lease_id, None)", "pass"),
    ],
    "num_trained": [
        ("trained = _sums(_num_trained(sequences)", "trained = _sums(sampled"),
        ('"num_trained", "num_tool_calls"', '"num_tool_calls"'),
    ],
    "self._opening(url, renderer, keyed)": [
        (
            "opening = self._opened[key] =",
            "await asyncio.gather(*self._opened.values(), return_exceptions=True); "
            "opening = self._opened[key] =",
        )
    ],
    "min(waiting": [("min(waiting, key=lambda turn: turn[0].spent_s())", "waiting[0]")],
    "crashes.attribute_steps": [
        (
            "crashes.attribute_steps(owner_of(key), self._work(received))",
            "self._work(received)",
        )
    ],
    "_of_run": [("deaths = _deaths(_of_run(folder, name))", "deaths = []")],
    "is_of_run": [("FailureCode.BAD_TASK if is_of_run else", "")],
    "is_whole": [("            if is_whole:\n", "            if True:\n")],
    "ORDER BY seq": [("ORDER BY seq LIMIT", "ORDER BY seq DESC LIMIT")],
    "OrderedSet": [("field(default_factory=OrderedSet)", "field(default_factory=set)")],
    "record.lease_confirmed": [("record.lease_confirmed and not", "not")],
    "name.startswith(TEMP_MARK)": [
        ("[name for name in names if name.startswith(TEMP_MARK)]", "list[str]()")
    ],
    "again=last.again + 1": [("again=last.again + 1 if last.first_seq else 0", "again=0")],
    "CUT_OFF": [("        if is_cut:\n", "        if False:\n")],
    "check_renderer": [
        (
            "config.renderer.settled(gateway.config.tokenizer, created_at)",
            'type(config.renderer)(model="bytes")',
        )
    ],
    "LeaseGrants.pump": [("(run.in_hand, place, run)", "(0, place, run)")],
    "make_folder": [("        sync_directory(folder.parent)\n", "        pass\n")],
    "RunDir.create": [("            sync_directory(Path(self.root))\n", "            pass\n")],
}
"""By the words of the page: each piece of their files that is replaced, and by what."""

HARMS_OTHERS = {"locks.take(folder / str(block))"}
"""Without these words a test ends the sandboxes of every other service of the machine. It runs in a
PID namespace, where it sees no process but its own.
"""
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _cases() -> list[tuple[str, list[Place], list[list[str]]]]:
    cases = []
    for row in rows(PAGE.read_text()):
        for words, there in places(row):
            if there:
                name = f"{row.guarantee[:60]} [{words}]"
                cases.append((name, there, pytest_arguments(row)))
    sample = os.environ.get("PRORL_GUARDS_SAMPLE", "")
    if sample:
        count, _, seed = sample.partition(":")
        cases = random.Random(int(seed or 0)).sample(cases, int(count))
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Look the lines up only where these tests are collected, not where the module is imported."""
    if "there" in metafunc.fixturenames:
        cases = _cases()
        metafunc.parametrize(("name", "there", "tests"), cases, ids=[case[0] for case in cases])


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


def switched_off(texts: dict[str, str], there: list[Place]) -> dict[str, str]:
    """The files of a row's words without its line."""
    by_hand = BY_HAND.get(there[0].words)
    if by_hand is not None:
        for line, _ in by_hand:
            assert any(line in text for text in texts.values()), line
        for line, off in by_hand:
            texts = {file: text.replace(line, off) for file, text in texts.items()}
        return texts
    for place in sorted(there, key=lambda place: -place.start):  # the later ones do not move
        text = texts[place.file]
        texts[place.file] = text[: place.start] + place.off + text[place.stop :]
    return texts


def test_a_test_fails_without(
    copy: Path, name: str, there: list[Place], tests: list[list[str]]
) -> None:
    texts = {place.file: (copy / place.file).read_text() for place in there}
    for file, text in switched_off(dict(texts), there).items():
        (copy / file).write_text(text)
    try:
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PRORL_POWER_CUTS": "60",
        }
        argv = [*ALONE] if there[0].words in HARMS_OTHERS else []
        argv += [sys.executable, "-m", "pytest", "-qx", "-m", "", "-p", "no:cacheprovider"]
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
        for file, text in texts.items():
            (copy / file).write_text(text)
