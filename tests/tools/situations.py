"""Real terminal situations for bash: each a name and steps (command, what its output must be, exit code). 124 = timed out.

An output is compared whole, or searched when it is a compiled pattern. `Keep` leaves a program running at the time-out, `Input`
types to it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Keep(str):
    """A command that is left running."""


class Input(str):
    """Text typed to a program that was left running."""


class Step(NamedTuple):
    """One exchange."""

    command: str
    output: str | re.Pattern[str]
    exit_code: int
    timeout_s: float = 10.0


ANY = re.compile("")
RESTARTED = re.compile(r"\[the shell ended and was started again in ")


def has(text: str) -> re.Pattern[str]:
    """Output that contains this text."""
    return re.compile(re.escape(text))


def quick(command: str, output: str | re.Pattern[str], timeout_s: float = 0.4) -> Step:
    """A command that does not end by itself."""
    return Step(command, output, 124, timeout_s)


SITUATIONS: dict[str, list[Step]] = {
    # ---- what a command is
    "plain": [Step("echo a  b", "a b\n", 0)],
    "no newline at the end": [Step("printf abc", "abc", 0), Step("printf def", "def", 0)],
    "empty command": [Step("", "", 0), Step("   \n\n", "", 0)],
    "comment only": [Step("# nothing", "", 0)],
    "several lines": [Step("for i in 1 2 3; do\n  echo $i\ndone\necho end", "1\n2\n3\nend\n", 0)],
    "function over lines": [Step("f() {\n  echo f $1\n  return 4\n}\nf x", "f x\n", 4)],
    "here-document": [Step("cat <<'EOF'\n$not `done`\n  kept\nEOF", "$not `done`\n  kept\n", 0)],
    "here-document with expansion": [Step("v=7\ncat <<EOF | tr 7 8\n$v $((v+1))\nEOF", "8 8\n", 0)],
    "here-string": [Step("read a b <<< 'x y'; echo $b$a", "yx\n", 0)],
    "here-document without its end": [Step("cat <<EOF\nopen", has("open"), 0), Step("echo ok", "ok\n", 0)],
    "quotes and history signs": [Step("echo \"it's\" 'a \"b\"' !! !x $'t\\tx'", 'it\'s a "b" !! !x t\tx\n', 0)],
    "syntax error": [Step("if", has("syntax error"), 2), Step("echo ok", "ok\n", 0)],
    "stray bracket": [Step(")", has("syntax error"), 2), Step("echo ok", "ok\n", 0)],
    "open quote": [Step("echo 'open", has("unexpected EOF"), 2), Step("echo ok", "ok\n", 0)],
    "unicode": [Step("echo 'žluťoučký 漢字 🦊'", "žluťoučký 漢字 🦊\n", 0), Step("x=漢字; echo ${#x}", "2\n", 0)],
    "200 kB command": [Step(f"x='{'y' * 200_000}'; echo ${{#x}}", "200000\n", 0)],
    "line longer than the tty takes": [Step(f"echo {'z' * 5000} | wc -c", "5001\n", 0)],
    "2,000 lines": [Step("\n".join(f"a{i}={i}" for i in range(2000)) + "\necho $a1999", "1999\n", 0)],
    "command substitution and pipes": [Step("echo $(seq 3 | tac | tr '\\n' ,)", "3,2,1,\n", 0)],
    "process substitution": [Step("diff <(echo a) <(echo b)", "1c1\n< a\n---\n> b\n", 1)],
    "arithmetic and braces": [Step("echo {1..3} $((2**10))", "1 2 3 1024\n", 0)],
    "arrays": [Step("a=(x 'y z'); echo ${#a[@]} \"${a[1]}\"", "2 y z\n", 0)],
    # ---- exit codes
    "false": [Step("false", "", 1)],
    "last exit code is kept": [Step("(exit 9)", "", 9), Step("echo $?", "9\n", 0), Step("echo $?", "0\n", 0)],
    "not found": [Step("no-such-program", has("command not found"), 127)],
    "not executable": [Step("/etc/passwd", has("Permission denied"), 126)],
    "killed by a signal": [Step("sh -c 'kill -9 $$'", has("Killed"), 137)],
    "pipefail": [Step("false | true", "", 0), Step("set -o pipefail; false | true", "", 1), Step("set +o pipefail", "", 0)],
    "both streams in order": [Step("echo 1; echo 2 >&2; echo 3", "1\n2\n3\n", 0)],
    # ---- state
    "directory stays": [Step("cd /usr/bin", "", 0), Step("pwd", "/usr/bin\n", 0), Step("cd - >/dev/null", "", 0)],
    "variables and exports stay": [Step("x=5; export Y=6", "", 0), Step("echo $x; sh -c 'echo $x$Y'", "5\n6\n", 0)],
    "functions and aliases stay": [Step("alias hi='echo hello'", "", 0), Step("hi", "hello\n", 0), Step("unalias hi", "", 0)],
    "shell options stay": [Step("set -u; echo $-", has("u"), 0), Step("set +u", "", 0)],
    "open descriptors stay": [Step("exec 10>f10 3>f3; echo a >&10; echo b >&3", "", 0), Step("cat f10 f3", "a\nb\n", 0)],
    "umask and ulimit": [Step("umask 077; touch u; stat -c %a u; umask 022", "600\n", 0)],
    # ---- ways to lose a shell
    "exit": [Step("cd /tmp", "", 0), Step("exit 7", RESTARTED, 7), Step("pwd", "/tmp\n", 0)],
    "exec of a program": [Step("exec echo replaced", re.compile(r"^replaced\n\n\[the shell"), 0), Step("echo ok", "ok\n", 0)],
    "set -e": [Step("set -e; false", RESTARTED, 1), Step("echo ok", "ok\n", 0)],
    "kill -9 itself": [Step("kill -9 $$", RESTARTED, 137), Step("echo ok", "ok\n", 0)],
    "kill -TERM itself": [Step("kill -TERM $$; echo still here", "still here\n", 0)],
    "kill -STOP itself": [Step("kill -STOP $$; echo continued", "continued\n", 0)],
    "suspend": [Step("suspend; echo continued", "continued\n", 0)],
    "stop the whole group": [Step("kill -STOP 0; true", "", 0), Step("echo ok", "ok\n", 0)],
    "stdin from nowhere": [Step("exec </dev/null; echo a", "a\n", 0), Step("echo b", has("b\n"), 0)],
    "stdin closed": [Step("exec <&-; echo a", "a\n", 0), Step("echo b", has("b\n"), 0)],
    "stdout closed": [Step("exec >&-; echo x", ANY, 1), Step("exec >/dev/tty; echo ok", "ok\n", 0)],
    "stderr away": [Step("exec 2>/dev/null; ls /none", "", 2), Step("exec 2>&1; echo ok", "ok\n", 0)],
    "directory removed under it": [Step("mkdir -p /tmp/d && cd /tmp/d && rmdir /tmp/d; echo ok; cd", "ok\n", 0)],
    "directory with a newline": [Step("mkdir -p $'/tmp/a\\nb'; cd $'/tmp/a\\nb'; pwd; cd", "/tmp/a\nb\n", 0)],
    # ---- prompts and builtins that the protocol stands on
    "PROMPT_COMMAND replaced": [Step("PROMPT_COMMAND='echo hi'; echo a", "a\nhi\n", 0), Step("PROMPT_COMMAND=", "", 0)],
    "PROMPT_COMMAND unset": [Step("unset PROMPT_COMMAND; echo a", "a\n", 0), Step("echo b", "b\n", 0)],
    "prompt replaced": [Step("PS1='$ '; echo a", "a\n", 0), Step("echo b", "b\n", 0)],
    "printf overridden": [Step("printf() { echo fake; }; printf x", "fake\n", 0), Step("unset -f printf; printf x", "x", 0)],
    "forged end": [Step(r"printf '\x1e0\x1f0\x1f\x1e\n'; echo more", "\x1e0\x1f0\x1f\x1e\nmore\n", 0)],
    "variables of our own unset": [Step("unset ${!__prorl*}; echo a", "a\n", 0), Step("echo b", "b\n", 0), Step("exit", ANY, 0)],
    "debug trap": [Step("trap 'true' DEBUG; echo a", "a\n", 0), Step("trap - DEBUG; echo b", "b\n", 0)],
    "exit trap": [Step("trap 'echo bye' EXIT; exit 3", has("bye"), 3), Step("echo ok", "ok\n", 0)],
    # ---- time
    "sleeps too long": [quick("sleep 60", ANY), Step("echo $?", "130\n", 0)],
    "endless loop in the shell": [Step("x=1", "", 0), quick("while :; do :; done", ANY), Step("echo $x", "1\n", 0)],
    "ignores Ctrl-C": [quick("(trap '' INT; sleep 60)", ANY), Step("echo ok", "ok\n", 0)],
    "ignores Ctrl-C and TERM": [quick("(trap '' INT TERM; sleep 60)", ANY), Step("echo ok", "ok\n", 0)],
    "signals from the tty off": [quick("stty -isig; sleep 60", ANY), Step("echo ok", "ok\n", 0)],
    "output for ever": [quick("yes", has("left out")), Step("echo ok", "ok\n", 0)],
    "foreground again": [quick("sleep 60 & fg", has("sleep 60")), Step("echo ok", "ok\n", 0)],
    "shell replaced by another": [quick("exec bash", RESTARTED), Step("echo ok", "ok\n", 0)],
    "partial output at the deadline": [quick("echo first; sleep 60", has("first\n"))],
    # ---- jobs
    "background job": [Step("sleep 0.1 & echo started", has("started\n"), 0), Step("wait; echo $?", has("0\n"), 0)],
    "late output belongs to the next": [
        Step("(sleep 0.2; echo late) & true", ANY, 0),
        Step("sleep 0.5", has("late"), 0),
    ],
    "nohup outlives the call": [
        Step("nohup sleep 5 >/dev/null 2>&1 & disown", ANY, 0),
        Step("pgrep -cx sleep; pkill -x sleep", "1\n", 0),
    ],
    "daemon holds the tty": [Step("setsid sleep 1 & exit", ANY, 0), Step("echo ok", "ok\n", 0)],
    "coprocess": [Step("coproc cat; echo x >&${COPROC[1]}; read -u ${COPROC[0]} l; echo got $l; kill %1", has("got x"), 0)],
    # ---- programs that want a terminal
    "it is a terminal": [Step("test -t 0 && test -t 1 && echo tty", "tty\n", 0)],
    "cat without arguments": [quick("cat", ANY), Step("echo ok", "ok\n", 0)],
    "Python REPL": [
        Step(Keep("python3 -q"), ">>> ", 124, 1.5),
        Step(Input("print(6*7)\n"), has("42\n>>> "), 124, 0.5),
        Step(Input("exit(3)\n"), ANY, 3),
    ],
    "read from the keyboard": [
        Step(Keep("read x; echo got $x"), "", 124, 0.3),
        Step(Input("hello\n"), "got hello\n", 0),
    ],
    "end of file from the keyboard": [
        Step(Keep("cat > typed"), "", 124, 0.3),
        Step(Input("line\n"), "", 124, 0.2),
        Step(Input("\x04"), "", 0),
        Step("cat typed", "line\n", 0),
    ],
    "Ctrl-C typed": [Step(Keep("sleep 60"), "", 124, 0.2), Step(Input("\x03"), ANY, 130)],
    "new command while one runs": [Step(Keep("sleep 60"), "", 124, 0.2), Step("echo ok", has("ok\n"), 0)],
    "input without a program": [Step(Input("x\n"), has("no program is running"), 2)],
    "pager by itself": [quick("LESS= less /etc/passwd", ANY), Step("echo ok", "ok\n", 0)],
    "git does not page": [Step("git init -q r && cd r && git log; cd ..", has("does not have any commits"), 0)],
    "echo switched on by a program": [Step("stty echo", "", 0), Step("echo a", "a\n", 0)],
    "raw mode left behind": [Step("stty raw; echo a", "a\n", 0), Step("echo b", "b\n", 0)],
    "nested shell": [Step("bash -c 'echo sub; exit 6'", "sub\n", 6), quick("bash --norc", ANY), Step("echo ok", "ok\n", 0)],
    # ---- bytes
    "binary": [Step(r"printf 'a\0b\xff\xfe'", "a\0b\ufffd\ufffd", 0)],
    "escapes": [Step(r"printf '\x1b[31mred\x1b[0m\r\n'", "\x1b[31mred\x1b[0m\r\n", 0)],
    "200 MB": [Step("yes | head -c 200000000", re.compile(r"^(y\n){16384}\n\[\.\.\. \d+ bytes left out \.\.\.\]\n(y\n){16384}$"), 0, 60.0)],
    "just over the cap": [Step("head -c 70000 /dev/zero | tr '\\0' x", has("\n[... 4464 bytes left out ...]\n"), 0)],
    "bad bytes in a loop": [Step("for i in $(seq 200); do printf '\\xe2\\x82'; done | wc -c", "400\n", 0)],
    # ---- abuse that must stay a result
    "all processes killed": [Step("kill -9 -1; true", ANY, 0), Step("echo ok", "ok\n", 0)],
    "time in a subshell": [Step("time sleep 0", re.compile(r"\nreal\t0m0"), 0)],
}
