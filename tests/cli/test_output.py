"""Tests of the output on a terminal of 80 columns: no word is broken, nothing is wider, a page is
redrawn.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from prorl.cli.app import COMMANDS
from prorl.cli.summary import lines, summarise
from tests.view.run_kinds import ROOT as RUN

COLUMNS, LINES = 80, 24
UNSET = ("COLUMNS", "LINES", "NO_COLOR")
WORDS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def output_of(*argv: str, **more_env: str) -> str:
    """Returns the output of a command on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in UNSET} | more_env
    process = subprocess.Popen(
        [sys.executable, *argv], stdout=theirs, stderr=theirs, stdin=theirs, env=env
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 1 << 16):
            parts.append(part)
    except OSError:  # the other side is closed
        pass
    process.wait()
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


SQL = (
    "select *",
    "select rollout_id, task_id, committed_at, reward, run_s, status, num_turns, env",
)


EACH_HELP = """
from prorl.cli.app import COMMANDS, dispatch
for command in COMMANDS:
    assert dispatch([command, "--help"]) == 0
"""


@pytest.mark.parametrize(
    "argv",
    [
        *(["sql", str(RUN), f"{select} from rollouts"] for select in SQL),
        ["show", str(RUN)],
        ["show", str(RUN), "--worst"],
        ["doctor"],
        ["sql", str(RUN), "select no_such_column from rollouts"],
    ],
    ids=" ".join,
)
def test_no_line_is_wider_than_the_terminal(argv: list[str]) -> None:
    _check_widths(WORDS.sub("", output_of("-m", "prorl.cli", *argv)))


def test_no_help_is_wider_than_the_terminal() -> None:
    text = WORDS.sub("", output_of("-c", EACH_HELP))
    assert re.findall(r"^Usage: prorl (\w+)", text, re.MULTILINE) == list(COMMANDS)
    _check_widths(text)


def _check_widths(text: str) -> None:
    assert text.strip()
    # A path, a hash or a query's word that is longer than the terminal cannot be helped.
    wide = [line for line in text.split("\n") if len(line.rstrip()) > COLUMNS]
    assert [line for line in wide if max(map(len, line.split())) < COLUMNS // 2] == []


def test_a_table_of_sql_prints_each_row_and_its_seconds_on_a_single_line() -> None:
    lines = output_of("-m", "prorl.cli", "sql", str(RUN), f"{SQL[1]} from rollouts").splitlines()
    assert len(lines) == 1 + 8
    (time,) = set(
        re.findall(
            r"20\d\d-\d\d-\d\d\S* ?\S*",
            output_of(
                *("-m", "prorl.cli", "sql", str(RUN), "select max(committed_at) from rollouts")
            ),
        )
    )
    assert re.fullmatch(r"[-\d]{10} [:\d]{8}", time)


def test_a_page_is_redrawn_where_it_stood_and_cut_to_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "watch.py"
    script.write_text(
        "from prorl.cli.output import redrawn, say\n"
        "for look in range(2):\n    with redrawn():\n"
        "        for line in range(30):\n            say(f'{look} {line}')\n"
    )
    first, second = output_of(str(script)).split("\x1b[H")[1:]
    assert len(second.splitlines()) == LINES, "with the one that erases what is below"
    assert "… and 8 lines more" in first
    assert "\x1b[2J" not in first


def test_the_first_word_of_bad_news_has_a_colour_unless_colours_are_off(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "from prorl.cli.output import say\n"
        "for line in ('ok    disk', '  CUT OFF   3', 'error: no', 'of failure  1'):\n"
        "    say(line)\n"
    )
    assert output_of(str(script), TERM="xterm").splitlines() == [
        "\x1b[32mok\x1b[0m    disk",
        "\x1b[33m  CUT OFF\x1b[0m   3",
        "\x1b[31merror\x1b[0m: no",
        "of failure  1",
    ]
    for plain in ({"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}):
        assert "\x1b" not in output_of(str(script), **plain)


def test_a_message_of_several_lines_is_indented_as_one() -> None:
    row = {"failure_class": "task", "failure_code": "bad_task", "n": 2, "example": "a:\n  b\n"}
    summary = {**summarise(RUN), "failures": [row]}
    assert "  failure   task/bad_task 2: a: b" in list(lines(summary))


def test_an_example_of_a_help_is_whole_when_it_is_copied() -> None:
    text = output_of("-m", "prorl.cli", "eval", "--help", TERM="xterm")
    copied = re.sub(r" *\\\n +", " ", WORDS.sub("", text))
    sets = "'arith:heldout?n=512,shop:heldout?n=512'"
    assert f"Example: prorl eval --tasks {sets} --policy toy --greedy\n" in copied


def test_a_table_breaks_no_word_while_the_longest_of_each_column_fit() -> None:
    names = ("name", "value", "unit", "min..max", "cpu s", "rival", "rival value", "ratio")
    row = ("handoff_p50_ms.scored", 0.172, "ms", "0.112..24.9", 1.35, "bare fdatasync", 11.2, "0.1")
    script = f"from prorl.cli.output import table; table({names}, [{row}])"
    lines = WORDS.sub("", output_of("-c", script)).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert set(" ".join(lines).split()) >= {"handoff_p50_ms.scored", "0.112..24.9", "fdatasync"}
