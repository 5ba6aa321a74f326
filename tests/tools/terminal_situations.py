"""Real terminal situations for bash: each a name and steps (command, what its output must be, exit
code). 124 = timed out.

An output is compared whole, or searched when it is a compiled pattern. `Keep` leaves a program
running at the time-out, `Input` types to it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Keep(str):
    """A command that is left running."""


class Input(str):
    """Text typed to a program that was left running."""


class Step(NamedTuple):
    command: str
    output: str | re.Pattern[str]
    exit_code: int
    timeout_s: float = 10.0


ANY = re.compile("")
RESTARTED = re.compile(r"\[the shell ended and was started again in ")
UNREAD_THEN_B = re.compile(
    r"^\[the shell (ended|could not read the command) and was started again in .*\]\nb\n$"
)
STATUS_OF_OPEN = {"echo $(": 1, 'echo "$(': 1, "a=(1 2": 1}
"""bash gives 2 for the other constructs that have no end."""


def has(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))


def quick(command: str, output: str | re.Pattern[str], timeout_s: float = 0.4) -> Step:
    return Step(command, output, 124, timeout_s)


SITUATIONS: dict[str, list[Step]] = {
    # ---- what a command is
    "no newline at the end": [Step("printf abc", "abc", 0), Step("printf def", "def", 0)],
    "empty command": [Step("", "", 0), Step("   \n\n", "", 0)],
    "several lines": [Step("for i in 1 2 3; do\n  echo $i\ndone\necho end", "1\n2\n3\nend\n", 0)],
    "function over lines": [Step("f() {\n  echo f $1\n  return 4\n}\nf x", "f x\n", 4)],
    "here-document": [Step("cat <<'EOF'\n$not `done`\n  kept\nEOF", "$not `done`\n  kept\n", 0)],
    "here-document without its end": [
        Step("cat <<EOF\nopen", has("open"), 0),
        Step("echo ok", "ok\n", 0),
    ],
    "quotes and history signs": [
        Step("echo \"it's\" 'a \"b\"' !! !x $'t\\tx'", 'it\'s a "b" !! !x t\tx\n', 0)
    ],
    "unicode": [
        Step("echo 'žluťoučký 漢字 🦊'", "žluťoučký 漢字 🦊\n", 0),
        Step("x=漢字; echo ${#x}", "2\n", 0),
    ],
    "200 kB command": [Step(f"x='{'y' * 200_000}'; echo ${{#x}}", "200000\n", 0)],
    # ---- exit codes
    "last exit code is kept": [
        Step("(exit 9)", "", 9),
        Step("echo $?", "9\n", 0),
        Step("echo $?", "0\n", 0),
    ],
    "killed by a signal": [Step("sh -c 'kill -9 $$'", has("Killed"), 137)],
    "a prompt of its own without PROMPT_COMMAND": [
        Step("PS1='$ '; unset PROMPT_COMMAND; echo x", "x\n", 0),
        Step("PS1='$ '; unset PROMPT_COMMAND; (exit 3)", "", 3),
        Step("echo $?", "3\n", 0),
        Step("set -u; false", "", 1),
        Step("echo $?", "1\n", 0),
        Step("true && false || echo b", "b\n", 0),
    ],
    # ---- state
    "directory stays": [
        Step("cd /usr/bin", "", 0),
        Step("pwd", "/usr/bin\n", 0),
        Step("cd - >/dev/null", "", 0),
    ],
    "open descriptors stay": [
        Step("exec 10>f10 3>f3; echo a >&10; echo b >&3", "", 0),
        Step("cat f10 f3", "a\nb\n", 0),
    ],
    # ---- ways to lose a shell
    "exit": [Step("cd /tmp", "", 0), Step("exit 7", RESTARTED, 7), Step("pwd", "/tmp\n", 0)],
    "exec of a program": [
        Step("exec echo replaced", re.compile(r"^replaced\n\n\[the shell"), 0),
        Step("echo ok", "ok\n", 0),
    ],
    "set -e": [Step("set -e; false", RESTARTED, 1), Step("echo ok", "ok\n", 0)],
    "kill -9 itself": [Step("kill -9 $$", RESTARTED, 137), Step("echo ok", "ok\n", 0)],
    "kill -STOP itself": [Step("kill -STOP $$; echo continued", "continued\n", 0)],
    "stop the whole group": [Step("kill -STOP 0; true", "", 0), Step("echo ok", "ok\n", 0)],
    "stdin from nowhere": [
        Step("exec </dev/null; echo a", "a\n", 0),
        Step("echo b", has("b\n"), 0),
    ],
    "stdin closed": [Step("exec <&-; echo a", "a\n", 0), Step("echo b", has("b\n"), 0)],
    "stdout closed": [Step("exec >&-; echo x", ANY, 1), Step("exec >/dev/tty; echo ok", "ok\n", 0)],
    "directory removed under it": [
        Step("mkdir -p /tmp/d && cd /tmp/d && rmdir /tmp/d; echo ok; cd", "ok\n", 0)
    ],
    "directory closed under it": [
        Step("mkdir -p z && cd z && chmod 0 .; echo ok", "ok\n", 0),
        Step("exit", has("was started again in"), 0),
        Step("[ $PWD = $HOME ]; chmod 700 z; rmdir z", "", 0),
        Step("chmod 0 ~; exit", has("was started again in /]"), 0),
        Step("pwd; chmod 755 ~; cd", "/\n", 0),
    ],
    # ---- prompts and builtins that the protocol stands on
    "PROMPT_COMMAND replaced": [
        Step("PROMPT_COMMAND='echo hi'; echo a", "a\nhi\n", 0),
        Step("PROMPT_COMMAND=", "", 0),
    ],
    "PROMPT_COMMAND unset": [
        Step("unset PROMPT_COMMAND; echo a", "a\n", 0),
        Step("echo b", "b\n", 0),
    ],
    "exported prompt says nothing in a shell below": [
        Step("export PS1", "", 0),
        Step(Keep("bash --norc"), "", 124, 0.5),
        Step(Input("echo in\n"), "in\n", 124, 0.3),
        Step(Input("exit 5\n"), "exit\n", 5),
        Step("bash --norc -i <<< 'exit 6'", has("exit"), 6),
        Step("export -n PS1", "", 0),
    ],
    "virtual environment, then a shell below": [
        Step(Keep('PS1="(v) $PS1"; export PS1; bash --norc'), "(v) ", 124, 0.5),
        Step(Input("exit 5\n"), "exit\n", 5),
        Step("export -n PS1", "", 0),
    ],
    "prompt replaced": [Step("PS1='$ '; echo a", "a\n", 0), Step("echo b", "b\n", 0)],
    "printf overridden": [
        Step("printf() { echo fake; }; printf x", "fake\n", 0),
        Step("unset -f printf; printf x", "x", 0),
    ],
    "forged end": [
        Step(r"printf '\x1e0\x1f0\x1f\x1e\n'; echo more", "\x1e0\x1f0\x1f\x1e\nmore\n", 0)
    ],
    "variables of our own unset": [
        Step("unset ${!__prorl*}; echo a", "a\n", 0),
        Step("echo b", "b\n", 0),
        Step("exit", ANY, 0),
    ],
    "exit trap": [Step("trap 'echo bye' EXIT; exit 3", has("bye"), 3), Step("echo ok", "ok\n", 0)],
    # ---- time
    "sleeps too long": [quick("sleep 60", ANY), Step("echo $?", "130\n", 0)],
    "endless loop in the shell": [
        Step("x=1", "", 0),
        quick("while :; do :; done", ANY),
        Step("echo $x", "1\n", 0),
    ],
    "ignores Ctrl-C and TERM": [
        quick("(trap '' INT TERM; sleep 60)", ANY),
        Step("echo ok", "ok\n", 0),
    ],
    "signals from the tty off": [quick("stty -isig; sleep 60", ANY), Step("echo ok", "ok\n", 0)],
    "output for ever": [quick("yes", has("left out")), Step("echo ok", "ok\n", 0)],
    "shell replaced by another": [quick("exec bash", RESTARTED), Step("echo ok", "ok\n", 0)],
    # ---- jobs
    "background job": [
        Step("sleep 0.1 & echo started", has("started\n"), 0),
        Step("wait; echo $?", has("0\n"), 0),
    ],
    "late output belongs to the next": [
        Step("(sleep 0.2; echo late) & true", ANY, 0),
        Step("sleep 0.5", has("late"), 0),
    ],
    "nohup outlives the call": [
        Step("nohup sleep 5 >/dev/null 2>&1 & disown", ANY, 0),
        # nohup has its own name until it becomes the program
        Step("until pgrep -u $UID -x sleep >/dev/null; do :; done", "", 0),
        Step("pgrep -u $UID -cx sleep; pkill -u $UID -x sleep", "1\n", 0),
    ],
    "daemon holds the tty": [Step("setsid sleep 1 & exit", ANY, 0), Step("echo ok", "ok\n", 0)],
    # ---- programs that want a terminal
    "it is a terminal": [Step("test -t 0 && test -t 1 && echo tty", "tty\n", 0)],
    "Python REPL": [
        Step(Keep("PYTHON_BASIC_REPL=1 python3 -q"), ">>> ", 124, 1.5),
        Step(Input("print(6*7)\n"), has("42\n>>> "), 124, 0.5),
        Step(Input("exit(3)\n"), ANY, 3),
    ],
    "end of file from the keyboard": [
        Step(Keep("cat > typed"), "", 124, 0.3),
        Step(Input("line\n"), "", 124, 0.2),
        Step(Input("\x04"), "", 0),
        Step("cat typed", "line\n", 0),
    ],
    "Ctrl-C typed": [Step(Keep("sleep 60"), "", 124, 0.2), Step(Input("\x03"), ANY, 130)],
    "new command while one runs": [
        Step(Keep("sleep 60"), "", 124, 0.2),
        Step("echo ok", has("ok\n"), 0),
    ],
    "input without a program": [Step(Input("x\n"), has("no program is running"), 2)],
    "pager by itself": [quick("LESS= less /etc/passwd", ANY), Step("echo ok", "ok\n", 0)],
    "git does not page": [
        Step("git init -q r && cd r && git log; cd ..", has("does not have any commits"), 0)
    ],
    "echo switched on by a program": [Step("stty echo", "", 0), Step("echo a", "a\n", 0)],
    "raw mode left behind": [Step("stty raw; echo a", "a\n", 0), Step("echo b", "b\n", 0)],
    # ---- what the protocol itself stands on, taken away
    "our input closed": [
        Step("exec 198<&-; echo a", "a\n", 0),
        Step("echo b", UNREAD_THEN_B, 0),
        Step("echo c", "c\n", 0),
    ],
    "our input replaced": [
        Step("exec 198</dev/null; echo a", "a\n", 0),
        Step("echo b", UNREAD_THEN_B, 0),
    ],
    "our output closed": [
        Step("exec 199>&-; echo a", "a\n", 0),
        Step("echo b", "b\n", 0),
        Step("exit 3", RESTARTED, 3),
    ],
    "all outputs and inputs closed": [
        Step("exec 0<&- 1>&- 2>&-", "", 0),
        Step("echo b", UNREAD_THEN_B, 0),
    ],
    "read-only prompt": [Step("readonly PS1; x=1", "", 0), Step("echo b", UNREAD_THEN_B, 0)],
    "read-only status": [Step("readonly __prorl_r", "", 0), Step("echo b", UNREAD_THEN_B, 0)],
    "read-only command": [Step("readonly __prorl_c", "", 0), Step("echo b", UNREAD_THEN_B, 0)],
    "read and eval are functions": [
        Step("read() { echo no; }; eval() { echo no; }", "", 0),
        Step("echo a", "a\n", 0),
        Step("unset -f read eval", "", 0),
    ],
    "eval is an alias": [
        Step("alias eval='echo no'; alias read=false", "", 0),
        Step("echo a", "a\n", 0),
        Step("unalias -a", "", 0),
    ],
    "builtins switched off": [
        Step("enable -n printf read", "", 0),
        Step("echo b", UNREAD_THEN_B, 0),
    ],
    "builtin is a function": [
        Step("builtin() { :; }", "", 0),
        Step("echo b", UNREAD_THEN_B, 0),
        Step("builtin() { false; }; readonly -f builtin", "", 0),
        Step("echo b", UNREAD_THEN_B, 0),
        Step("alias builtin=:; echo c", "c\n", 0),
        Step("echo d; unalias -a", "d\n", 0),
    ],
    "every other builtin is a function": [
        Step(
            "for b in $(compgen -b); do case $b in builtin);;"
            ' *) builtin eval "function $b { builtin echo no; }";; esac; done',
            "",
            0,
        ),
        Step("builtin echo a; (builtin exit 3)", "a\n", 3),
        Step(
            "builtin echo $?; for b in $(builtin compgen -b); do builtin unset -f $b; done",
            "3\n",
            0,
        ),
        Step("echo b", "b\n", 0),
    ],
    "reserved words are aliases": [
        Step("for w in case if while for esac then do fi; do alias $w='echo no'; done", "", 0),
        Step("echo a", "a\n", 0),
        Step("false", "", 1),
        Step("echo $?; unalias -a", "1\n", 0),
    ],
    "error trap runs once": [
        Step("n=0; trap 'n=$((n+1))' ERR; false", "", 1),
        Step("echo $?; trap - ERR; echo $n", "1\n1\n", 0),
    ],
    "our function is not listed": [
        Step("unset -f f hi; g() { echo g; }; declare -f", "g () \n{ \n    echo g\n}\n", 0),
        Step("declare -F; set", re.compile(r"\A((?!__prorl).)*\Z", re.DOTALL), 0),
        Step("unset -f $(compgen -A function) 2>/dev/null; echo a", "a\n", 0),
        Step("echo b", UNREAD_THEN_B, 0),
    ],
    "eval switched off": [Step("enable -n eval", "", 0), Step("echo b", "b\n", 0)],
    "trace shows only the command": [
        Step("set -x; echo a", "++ echo a\na\n", 0),
        Step("echo b", "+ builtin eval 'echo b'\n++ echo b\nb\n", 0),
        Step("set +x", ANY, 0),
        Step("echo c", "c\n", 0),
    ],
    "trace leaves a last line without its end alone": [
        Step("set -x; printf abc", "++ printf abc\nabc", 0),
        Step("printf def", "+ builtin eval 'printf def'\n++ printf def\ndef", 0),
        Step("set +x; printf z", "+ builtin eval 'set +x; printf z'\n++ set +x\nz", 0),
    ],
    "verbose leaves a last line without its end alone": [
        Step("set -v; printf abc", "abc", 0),
        Step("printf def", "printf def\ndef", 0),
        Step("set +v", "set +v\n", 0),
    ],
    "verbose shows only the command": [
        Step("set -v; echo a", "a\n", 0),
        Step("set +v; echo b", "set +v; echo b\nb\n", 0),
    ],
    "debug trap that prints": [
        Step("trap 'echo \"> $BASH_COMMAND\"' DEBUG; echo a", "> echo a\na\n", 0),
        Step("trap - DEBUG", "> trap - DEBUG\n", 0),
        Step("echo b", "b\n", 0),
    ],
    "debug trap says nothing behind the end": [
        Step("trap 'echo d' DEBUG", "", 0),
        Step("trap - DEBUG", "d\nd\nd\n", 0),
        Step("echo b", "b\n", 0),
    ],
    "our variables are not listed": [Step("declare -p __prorl_n; echo a", "a\n", 0)],
    "every construct left open": [
        step
        for text in (
            "while true; do echo a",
            "((1+",
            "echo 'a\\",
            "echo $(",
            'echo "$(',
            "case x in",
            "f() {",
            "a=(1 2",
            "[[ x ==",
            "echo ${x",
        )
        for step in (
            Step(
                text, re.compile("syntax error|unexpected|conditional"), STATUS_OF_OPEN.get(text, 2)
            ),
            Step("echo ok", "ok\n", 0),
        )
    ],
    # ---- things that agents do
    "signals that end a shell": [
        Step("kill -HUP $$; echo k", RESTARTED, 129),
        Step("kill -PIPE $$", RESTARTED, 141),
        Step("echo b", "b\n", 0),
    ],
    "size of the terminal": [Step("stty size; tput cols", "50 200\n200\n", 0)],
    "carriage returns in the command": [Step("echo a\r\necho b\r", "a\r\nb\r\n", 0)],
    "full-screen editor": [
        quick("vi x", has("\x1b[")),
        Step("echo ok", "ok\n", 0),
        Step("stty -a | grep -c -- -echo", ANY, 0),
    ],
    "editor left by its keys": [
        Step(Keep("vi x"), has("\x1b["), 124, 1.0),
        Step(Input("\x1b:q!\n"), ANY, 0),
        Step("echo b", "b\n", 0),
    ],
    "job stopped and continued": [
        Step(Keep("sleep 30"), "", 124, 0.2),
        Step(Input("\x1a"), has("Stopped"), 148),
        quick("fg", has("sleep 30")),
        Step("jobs", "", 0),
    ],
    "output to a file for good": [
        Step("exec >log 2>&1; echo hidden", "", 0),
        Step("echo more", "", 0),
        Step("exec >/dev/tty 2>&1; cat log", "hidden\nmore\n", 0),
    ],
    "size limit of the shell": [
        Step("ulimit -t 1; while :; do :; done", RESTARTED, 137),
        Step("echo ok", "ok\n", 0),
    ],
    "shell without memory": [
        Step(
            "ulimit -v 60000; x=$(head -c 100000000 /dev/zero | tr '\\0' x)",
            has("cannot allocate"),
            2,
        ),
        Step("echo ok", "ok\n", 0),
    ],
    # ---- bytes
    "binary": [Step(r"printf 'a\0b\xff\xfe'", "a\0b\ufffd\ufffd", 0)],
    "escapes": [Step(r"printf '\x1b[31mred\x1b[0m\r\n'", "\x1b[31mred\x1b[0m\r\n", 0)],
    "half a surrogate pair": [
        Step("echo \ud83d", has("surrogates not allowed"), 2),
        Step("echo ok", "ok\n", 0),
    ],
    # ---- what a program inherits
    "descriptors of a program": [
        Step("ls /proc/self/fd | sort -n | xargs", "0 1 2 3 198 199\n", 0)
    ],
    "ends of its own session": [Step("ps -o sid= -p $$ | tr -d ' ' | grep -cx $$", "1\n", 0)],
    # ---- abuse that must stay a result
    "all processes killed": [Step("kill -9 -1; true", ANY, 0), Step("echo ok", "ok\n", 0)],
}
