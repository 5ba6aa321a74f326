r"""The fixed lines that are typed to bash, and the marker that it prints.

What a command says never crosses the tty; these lines read it from a descriptor and evaluate it. A
command's end stands in the middle of its output:

    \x1e NONCE sequence \x1f exit code \x1f NONCE \x1e

The nonce is new for each shell, so an agent does not print a marker by accident. Short and without
a newline: one write, which no background job can split.

Written so that little of what an agent can do to its shell gets in the way: functions and aliases
named like builtins and reserved words (what is parsed before the agent's first command is out of an
alias's reach), closed outputs, a prompt of its own, `set -e`, and the state in which bash's parser
is after the error of an open quote (no reserved word may come first). A function named `builtin`
is not gone around: the server sees that its command was not read.
"""

from __future__ import annotations

import os

BEGIN, SEPARATOR = b"\x1e", b"\x1f"
MAX_BYTES = 80
OURS = b"__prorl_"
"""The beginning of all our names in the shell."""
COMMAND_FD, TTY_FD = 198, 199
"""Numbers inside the shell, high enough to leave the agent `exec 3<file`.

Its programs inherit both: closing them around the `eval` would make bash save them at 10 and 11,
which the agent may want.
"""
FUNCTION = OURS + b"read"
REARM = "PS1=$__prorl_p;PS2=;PROMPT_COMMAND[__prorl_i]=$__prorl_e;\\builtin enable eval"
"""Before each command: what an earlier one did to the prompt is undone."""
READ = (
    f'IFS= \\builtin read -rd "" -u {COMMAND_FD} __prorl_c&&__prorl_n=$1||__prorl_c=;'
    "\\builtin return $__prorl_r"
)
"""Reads the command; makes `$?` what the one before left."""
STATUS = "${__prorl_s:-$?}"
"""Exit code of the command: kept at its end, before the prompt is put back; else (a syntax error,
an interrupt) bash's own.
"""
PROMPT = f"${{__prorl_h:+$__prorl_h$__prorl_n$__prorl_m{STATUS}$__prorl_t}}"
"""A PS1 that says nothing in a shell below ours, which has the exported PS1 of a virtual
environment, but not the parts of the marker.
"""


def introduction(sequence: int, fd: int) -> str:
    """The first line to a new shell: have it evaluate `setup`, to be read from descriptor `fd`."""
    return f'__prorl_n={sequence};IFS= read -rd "" -u {fd} __prorl_c;eval "$__prorl_c"\n'


def emission(marker: Marker) -> str:
    """The command that prints the marker.

    `set -v` shows this text, on the last line of a command that prints no newline at its end.

    In braces with closed outputs (three times as fast as opening /dev/null), so that `set -x` and a
    DEBUG trap show nothing there.
    """
    mark = marker.text("${__prorl_n}", "%s")
    return f'{{ \\builtin printf "{mark}" "{STATUS}" >&{TTY_FD};PS1=$__prorl_p;}} >&- 2>&-'


def setup(marker: Marker, fd: int) -> str:
    """Puts the descriptors into place and makes both prompts print the marker."""
    nonce = marker.nonce.decode()
    return (
        f"{FUNCTION.decode()}(){{ {REARM};{READ};}};"
        f"exec {COMMAND_FD}<&{fd} {fd}<&- {TTY_FD}>&1;set +H +o history;unset HISTFILE;"
        f"__prorl_h=$'\\036{nonce}' __prorl_m=$'\\037' __prorl_t=$'\\037{nonce}\\036';"
        f"__prorl_p='{PROMPT}';__prorl_e='{emission(marker)}';__prorl_i=0;"
        "((BASH_VERSINFO[0]*100+BASH_VERSINFO[1]>=501))&&PROMPT_COMMAND=('')&&__prorl_i=1;" + REARM
    )


def evaluation(sequence: int) -> str:
    """The line before each command.

    Behind it the prompt is put back, should the command have changed it and removed
    PROMPT_COMMAND. The marker says `sequence - 1` as long as the command has not been read, then
    `sequence`. In an `&&` list a status that is not 0 is no error to `set -e` and to an ERR trap.
    """
    prepare = f"__prorl_n={sequence - 1} __prorl_r={STATUS} __prorl_s= __prorl_c="
    read = f"{{ {FUNCTION.decode()} {sequence}&&__prorl_r=;}} >&- 2>&-"
    restore = "{ __prorl_s=$?;PS1=$__prorl_p;} >&- 2>&-"
    return f'{prepare};{read};\\builtin eval "$__prorl_c";{restore}\n'


class MarkerMatch:
    """A marker in a buffer: where it is and what it says."""

    def __init__(self, start: int, end: int, sequence: int | None, exit_code: int) -> None:
        self.start, self.end, self.sequence, self.exit_code = start, end, sequence, exit_code
        """`sequence` None: the command has unset the shell's variables, so the marker can only be
        its own.
        """


class Marker:
    """Makes and finds the markers of one shell: its nonce is in each."""

    def __init__(self) -> None:
        self.nonce = os.urandom(8).hex().encode()
        self._head = BEGIN + self.nonce
        self._tail = SEPARATOR + self.nonce + BEGIN

    def text(self, sequence: str, exit_code: str) -> str:
        """A marker as printf and prompts write it, with shell expressions for its two numbers."""
        nonce = self.nonce.decode()
        return rf"\036{nonce}{sequence}\037{exit_code}\037{nonce}\036"

    def find(self, data: bytes) -> MarkerMatch | None:
        """The first whole marker in these bytes, or None."""
        tail = data.find(self._tail)
        while tail >= 0:
            start = data.rfind(self._head, 0, tail)
            sequence, _, exit_code = data[start + len(self._head) : tail].partition(SEPARATOR)
            if start >= 0 and exit_code.isdigit() and (sequence.isdigit() or not sequence):
                return MarkerMatch(
                    start,
                    tail + len(self._tail),
                    int(sequence) if sequence else None,
                    int(exit_code),
                )
            tail = data.find(self._tail, tail + 1)
        return None

    def unfinished(self, data: bytes) -> int:
        """Returns where a marker may have begun that is not whole yet; the length of `data` if
        nowhere.
        """
        start = data.rfind(BEGIN, -MAX_BYTES)
        if start < 0 or len(data) - start >= MAX_BYTES:
            return len(data)
        rest = data[start:]
        return start if self._head.startswith(rest) or rest.startswith(self._head) else len(data)
