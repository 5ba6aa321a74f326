"""The program that `verify.py` keeps warm: a JSON line in, a JSON line out.

`{gold, answer}` comes in, `{verdict}` or `{error}` goes out; a first line says that it is ready.

Each check has CHECK_CPU_S of processor time; then SIGPROF ends the process, whatever it does.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from prorl.envs.verify import CHECK_CPU_S
from prorl.types import Json

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer lines until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    out = sys.stdout
    sys.stdout = sys.stderr  # what sympy prints is no answer
    _compare("1", "1")
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)
        found = _answer(question["gold"], question["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), file=out, flush=True)


def _answer(gold: str, answer: str) -> Json:
    try:
        return {"verdict": _compare(gold, answer)}
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as why:
        return {"error": f"{type(why).__name__}: {why}"[:500]}


def _compare(gold: str, answer: str) -> bool:
    """Raises ValueError for a reference that does not parse."""
    from math_verify import parse, verify

    # its own limits count by the clock and turn a time-out into "wrong"
    golds = parse(f"${gold}$", parsing_timeout=0, raise_on_error=True)
    if not golds:
        raise ValueError(f"the reference answer {gold!r} does not parse")
    given = parse(f"${answer}$", parsing_timeout=0)
    return bool(verify(golds, given, timeout_seconds=0, raise_on_error=True))


if __name__ == "__main__":
    main()
