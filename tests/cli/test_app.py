"""Command lines: help, mistakes in one line with an exit code, no traceback."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from prorl.cli.app import COMMANDS, build, dispatch
from prorl.cli.output import clean


def test_every_command_has_help_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in build() if not name.startswith("-")]
    assert names == list(COMMANDS)
    for name in names:
        assert dispatch([name, "--help"]) == 0
        assert f"prorl {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_wraps_its_paragraphs_and_lists_no_option_that_nobody_wrote(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert dispatch([name, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"Usage: prorl {name}")
    assert not re.search(r"--(empty|no)-(?!wait)|ACTION --action|default: (\"\"|False)", help_text)
    for paragraph in help_text.partition("╭")[0].split("\n\n"):
        lines = paragraph.splitlines()
        for line, following in pairwise(lines):
            assert len(f"{line} {following.split()[0]}") > 80, "the line had room for a word more"


def test_the_help_of_a_command_has_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["sql", "--help"]) == 0
    assert "Example: prorl sql" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["rnu"], "unknown command `rnu`; expected one of demo, run"),
        (["run", "--taks", "x"], "--tasks"),
        (["run", "--tasks", "x", "-n", "many"], "a whole number"),
        (["bench", "nonsense"], "unknown benchmark 'nonsense'; expected one of"),
        (["run"], "no task file; expected --tasks FILE"),
        (["run", "--tasks", "missing.jsonl"], "no file missing.jsonl"),
        (["run", "--tasks", "x", "--policy", "orcle"], "did you mean `oracle`?"),
        (["run", "--tasks", "x", "--set", "run.sed=1"], "did you mean `seed`?"),
        (["show", "nothing"], "no run 'nothing' in prorl-runs"),
        (["run", "--resume"], "nothing to resume in"),
        (["run", "tasks.jsonl"], "--tasks FILE to run a task file"),
        (["eval", "--tasks", "arith:heldout", "--policy", "toy", "--n", "0"], "expected 1 or more"),
        (["gc", "--grace-s", "-1"], "--grace-s -1; expected 0 or more"),
        (["gc", "--root", "nowhere"], "no folder nowhere: expected the root of runs"),
        (["show", "--best"], "an option that chooses a rollout, without a run"),
        (["sql"], "no RUN; see `prorl sql --help`"),
        (["run", "--tasks"], "`--tasks` stands alone; expected a value after it"),
        (["serve", "--port", "many"], "--port 'many'; expected a whole number"),
        (["serve", "--as", "slime"], "--as 'slime'; expected nemo-gym, prorl-agent, or one"),
        (["verify", "a", "b", "c"], "is more than this command takes"),
        (["show", "--rot", "x"], "unknown option: --rot; did you mean --root?"),
        (["show", "r", "9"], "a rollout is chosen by `--rollout 9`; see `prorl show --help`"),
        (["replay", "r", "--port", "99999"], "--port 99999; expected 1 to 65535; leave it out"),
        (["serve", "--policy", "htp://127.0.0.1:8000"], "of the unknown scheme 'htp'; expected"),
        (["report", "a", "b", "--only", "pass"], "--only with two runs"),
        (["doctor", "--set", "x=1"], "--set without --model"),
        (["eval", "--stored", "r", "--policy", "toy"], "--policy with --stored; expected --name"),
        (["eval", "--stored", "r", "--seed", "1"], "--seed with --stored; expected --name"),
        (["eval", "--tasks", "t", "--eval-s", "9"], "--set run.limits.eval_s=9"),
        (["eval", "--tasks", "t", "--sandbox", "pyns"], "--set service.sandbox.kind=pyns"),
        (["node", "--drain", "n7", "--name", "n7"], "--drain with a join file or --name"),
        (
            ["node", "--drain", "n7", "--walltime", "9:00"],
            "--walltime with --drain; expected --root",
        ),
        (["node", "j.json", "--name", "n", "--deadline", "9"], "--deadline without --drain"),
        (["serve", "--policy", "http://127.0.0.1:9"], "add --set service.tokenizer=DIR"),
        (["run", "--tasks", "x", "--policy", "http://127.0.0.1:9"], "run.renderer.model=DIR"),
        (["serve", "--policy", "http://127.0.0.1:9/v1"], "expected the address without /v1"),
        (["gc", "--drop", "--older-than-days", "-1"], "--older-than-days -1; expected 0 or more"),
        (["gc", "--drop", "--older-than-days", "nan"], "--older-than-days nan; expected 0 or more"),
        (["status", "--watch", "0"], "--watch 0; expected 0.1 to 3600 seconds"),
        (["demo", "--resume"], "nothing to resume in"),
        (["demo", "--control", "nonsense"], "control"),
        (["demo", "--trainer", "trl", "--control", "shuffled-rewards"], "expected --trainer own"),
        pytest.param(
            *(["demo", "--trainer", "trl"], "trl not installed; expected the package of --trainer"),
            marks=pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed here"),
        ),
        (["demo", "--policy", "nonsense"], "http://HOST:PORT"),
        (["demo", "--policy", "http://127.0.0.1:9"], "start the model server"),
        (["eval", "--tasks", "arith:heldout?n=0", "--policy", "toy"], "positive"),
        (["image", "rm", "none", "--images", "."], "no image 'none' in"),
        (["image", "rm"], "prorl image rm without a name; expected NAME..."),
        (["image", "build", "a/b", "--from", ".", "--images", "."], "image name 'a/b'; expected"),
        (
            ["image", "build", "one", "--from", "docker://debian", "--images", "."],
            "image source 'docker://debian'; expected a folder",
        ),
    ],
)
def test_a_mistake_is_a_single_line_and_exit_code_2(
    argv: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dispatch(argv) == 2
    captured = capsys.readouterr()
    *noted, line = captured.err.splitlines()
    assert line.startswith("error: ")
    assert not noted or argv[:2] == ["image", "build"], "what its child says is told, too"
    assert expected in line
    assert not captured.out
    assert not (tmp_path / "prorl-runs").exists()


@pytest.mark.parametrize(
    "text", ["\x1b]0;title\x07", "a\rb", "\u202eright", "\x9b31m", "\u2066", "\x00"]
)
def test_what_could_move_a_terminal_is_spelled_out(text: str) -> None:
    assert clean(text).isprintable()
    assert "\\" in clean(text)


def test_ordinary_text_is_unchanged() -> None:
    text = "naïve 日本語 🙂\n\tindented"
    assert clean(text) == text
