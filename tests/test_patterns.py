"""Regular expressions that read text of others are linear in it, whatever it repeats.

Every pattern of prorl/, stages/, storage/ and trainer/ is collected: from the values of the
modules, and from the calls of `re` in their syntax trees. A pattern that is put together within a
function stands in EXAMPLES, as it may look there. Each pattern reads texts that are made for it:
its own literals again and again, the beginning of each of its repetitions, a repetition that never
ends, and signs of every kind. A pattern that reads a bounded text is in BOUNDED, with the bound.

Whole readers, which may go over a text more than once, follow below; those of the call grammars are
in `tests/renderer/test_grammars.py`.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from re import _constants as sre
from re import _parser as sre_parser
from types import FrameType
from typing import Any, NamedTuple

import pytest

from prorl.envs.answers import measures
from prorl.envs.answers.find import final_answer
from prorl.envs.answers.grade import MAX_REFERENCE_CHARS
from prorl.envs.swe import logs
from prorl.renderer import guard
from prorl.tasks.formats.questions import GSM8K
from tests import growth
from tests.growth import GROWTH, TRIES, Repeated, is_quadratic

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("prorl", "stages", "storage", "trainer")
METHODS = ("match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split")
NUM_CHARS = 20_000
SLOW_S, BOUNDED_S, MOST_S = 0.02, 0.3, 0.5
"""CPU seconds for NUM_CHARS. A linear pattern takes a two-hundredth of a second and is not looked
at further; a quadratic one takes 50 to 200 million steps, .05 s or more on a fast machine. One that
tries 400 letters from each place may take as long as that, so that the growth decides. A text that
takes MOST_S is not read to its end. A pattern of BOUNDED may grow, but takes less than BOUNDED_S
for its longest text, an eighth of what its helper has.
"""
SHORTER, FAST_S = 10, 0.0003
"""A text is read at a tenth of its length first, and at its whole length where that takes longer
than FAST_S. Most patterns take a third of that; a quadratic one takes .8 ms on a fast machine.
By the clock on the wall, since CPU time is counted in ticks of four milliseconds on some machines;
a busy machine only makes more texts be read at their whole length.
"""
SIGNS = (
    *(" ", "\n", "a", "1", "-", "(", "{", "<", "\\", "$", ",", "=", "a ", "1.", "1,", "\\a", " \n"),
    *("a=", ", "),
)

ANSWERS = "prorl/envs/answers"
BOUNDED: dict[tuple[str, str], int] = {
    (f"{ANSWERS}/grade.py", "_FOR_ALL"): MAX_REFERENCE_CHARS,
    (f"{ANSWERS}/notation.py", "_ELLIPSIS"): MAX_REFERENCE_CHARS,
    (f"{ANSWERS}/words.py", "_PRICE"): MAX_REFERENCE_CHARS,
}
"""Letters that a pattern reads at most, by file and name. These are patterns of the graders, which
run in helpers with 2.5 s of CPU (`prorl/envs/grading.py`); `grade` refuses longer texts.
"""
EXAMPLES: dict[str, tuple[str, ...]] = {
    f"{ANSWERS}/grade.py": (
        r"real|\\mathbb ?\{? ?R|ℝ",
        r"(?<![A-Za-z\\])x(?![A-Za-z])|[<>≤≥]",
        r"(?<=\d) in the (?:afternoon|evening)$",
    ),
    f"{ANSWERS}/measures.py": (
        r"(?s)(?:^|[\s(])A[).:] ?(.*?)(?=[\s(]{1,4}[A-J][).:] |[\s(]{1,4}[A-J]\)|$)",
        r"(?<![\w^}{])\+\*(?![\w^}{])",
        r"\$?x\b\$?(?=[:.?]|$)",
        r"\b(?:per|each|every|an?) day\b",
        r"\b15(?:st|nd|rd|th) term\b",
        rf"(?<![\w+*/-])(?<![+*/-] )x ?(?:= ?-?{measures._A_VALUE}|\\to|→)",
        r"(?<![A-Za-z])AB(?![A-Za-z])",
        r"[a-z]''(?: ?\([a-z]\))?",
    ),
    f"{ANSWERS}/words.py": (r"\bdollar",),
    "prorl/envs/code.py": (r"(?m)^(?:async\s+)?def\s+solve\b",),
    "prorl/envs/swe/logs.py": ("",),  # `by_line`: its parsers are read below
    "prorl/renderer/guard.py": (r"<\|im_start\|>|<\|im_end\|>",) * 2,
    "prorl/renderer/model.py": (rf"(?<!{guard.OPEN})(?:<\|im_end\|>|</s>)",),
    "prorl/renderer/proof.py": (
        r"(?:<think>|</think>)\s*",
        r"(?s)<think>(?:(?!<think>).)*?</think>\s*",
    ),
    "prorl/tokenizer.py": (r"<\|im_start\|>|<\|im_end\|>",),
}
"""How the patterns look that only a call can put together, by file: one for each expression."""


class PatternUse(NamedTuple):
    """A pattern and the methods that it is used with."""

    file: str
    name: str
    pattern: re.Pattern[Any]
    methods: set[str]


# ---- collecting


@cache
def sources() -> dict[str, str]:
    """The text of each source file, by its path."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def files_with_patterns() -> list[str]:
    """The source files that import `re`."""
    imports = re.compile(r"^\s*(?:import re|from re import .*)$", re.MULTILINE)
    return [file for file, text in sources().items() if imports.search(text)]


@cache
def collected() -> tuple[list[PatternUse], set[tuple[str, str]]]:
    """The patterns, and what only a call can put together: (file, expression)."""
    everywhere = _methods_used("\n".join(sources().values()))
    patterns: dict[tuple[str, str, int], PatternUse] = {}
    unknown: set[tuple[str, str]] = set()

    def add(file: str, name: str, pattern: re.Pattern[Any], methods: set[str]) -> None:
        key = file, str(pattern.pattern), pattern.flags
        patterns.setdefault(key, PatternUse(file, name, pattern, set())).methods.update(methods)

    for file in files_with_patterns():
        text = sources()[file]
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        values = vars(
            importlib.import_module(name if name.startswith("prorl") else f"prorl.{name}")
        )
        assigned, here = set(re.findall(r"(?m)^(\w+)\b.*=", text)), _methods_used(text)
        for name in assigned & values.keys():
            used = (here if name.startswith("_") else everywhere)[name]
            for pattern in _patterns_in(values[name]):
                add(file, name, pattern, used or {"finditer"})
        for call, is_local in _calls(ast.parse(text)):
            assert isinstance(call.func, ast.Attribute)
            made_by = ast.unparse(call.args[0])
            try:
                pattern = re.compile(eval(made_by, dict(values)), _flags(call))
            except NameError:
                if is_local:
                    unknown.add((file, made_by))
                continue
            if call.func.attr != "compile" or is_local:
                add(file, made_by, pattern, {call.func.attr} & {*METHODS} or {"finditer"})
    return list(patterns.values()), unknown


def _methods_used(text: str) -> defaultdict[str, set[str]]:
    """The methods of patterns that a text calls, by the name of what it calls them on."""
    methods = defaultdict[str, set[str]](set)
    for name, method in re.findall(rf"\b(\w+)(?=\.({'|'.join(METHODS)})\b)", text):
        methods[name].add(method)
    return methods


def _patterns_in(value: object, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth and isinstance(value, tuple | list | set | frozenset | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _patterns_in(item, depth - 1)


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, bool]]:
    """Calls of `re`, and whether each stands in a function."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    local = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "re"
            and node.func.attr in (*METHODS, "compile")
        ):
            yield node, node in local


def _flags(call: ast.Call) -> int:
    assert isinstance(call.func, ast.Attribute)
    place = {"compile": 1, "sub": 4, "subn": 4, "split": 3}.get(call.func.attr, 2)
    named = [word.value for word in call.keywords if word.arg == "flags"]
    return sum(
        eval(ast.unparse(expression), {"re": re})
        for expression in [*call.args[place : place + 1], *named]
    )


# ---- texts that are made for a pattern


def texts(pattern: re.Pattern[Any]) -> list[Repeated]:
    source = pattern.pattern
    tree = sre_parser.parse(source if isinstance(source, str) else source.decode("latin-1"))
    seeds, repetitions = list(SIGNS), list[tuple[str, str]]()
    for case in range(3):
        sample = _sample(tree, "", repetitions, {}, case)
        seeds += [sample, sample[:-1]]
    made = [Repeated("", seed) for seed in seeds if seed]
    for before, inner in dict.fromkeys(repetitions):
        unit = inner or "a"
        made += [Repeated(before, unit), Repeated(before, unit, "\0"), Repeated("a", unit, "!")]
        again = (before, before + inner, before + inner + "\n")
        made += [Repeated("", seed) for seed in again if seed]
    return list(dict.fromkeys(made))


def _sample(
    tree: Any, before: str, repetitions: list[tuple[str, str]], groups: dict[int, str], case: int
) -> str:
    """A text of a pattern's tree behind `before`; adds what precedes each repetition, and it.

    `case` says which branch is taken, and whether what may be absent is there.
    """

    def inside(tree: Any) -> str:
        return _sample(tree, before + text, repetitions, groups, case)

    text = ""
    for kind, value in tree:
        match kind:
            case sre.MAX_REPEAT | sre.MIN_REPEAT | sre.POSSESSIVE_REPEAT:
                least, most, body = value
                inner = inside(body)
                if most is sre.MAXREPEAT or most > 8:
                    repetitions.append((before + text, inner))
                text += inner * max(least, 0 if case else 1)
            case sre.SUBPATTERN:
                groups[value[0]] = inside(value[3])
                text += groups[value[0]]
            case sre.BRANCH:
                branches = [inside(branch) for branch in value[1]]
                text += branches[case % len(branches)]
            case sre.GROUPREF:
                text += groups.get(value, "")
            case sre.ATOMIC_GROUP:
                text += inside(value)
            case sre.ASSERT:
                inner = inside(value[1])
                text += "" if value[0] > 0 or text else inner
            case sre.LITERAL:
                text += chr(value)
            case sre.NOT_LITERAL | sre.ANY:
                text += "b" if value == ord("a") else "a"
            case sre.IN:
                text += _member(value)
    return text


def _member(parts: Any) -> str:
    """A letter of a set."""
    is_negated = parts[0][0] is sre.NEGATE
    for char in "a1 -.\n\t,A({[<\">$\\_'/":
        if any(_has(kind, value, char) for kind, value in parts) != is_negated:
            return char
    kind, value = parts[0]
    return chr(value if kind is sre.LITERAL else value[0])


def _has(kind: Any, value: Any, char: str) -> bool:
    match kind:
        case sre.LITERAL:
            return bool(value == ord(char))
        case sre.RANGE:
            return bool(value[0] <= ord(char) <= value[1])
        case sre.CATEGORY:
            *_, negation, name = f"_{value}".split("_")
            word = {"DIGIT": char.isdigit(), "SPACE": char.isspace()}
            return word.get(name, char.isalnum() or char == "_") != (negation == "NOT")
    return False


# ---- reading


class TooSlowError(Exception):
    """A pattern has taken more CPU than it may."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlowError


def cost_s(
    pattern: re.Pattern[Any],
    methods: set[str],
    text: str,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """CPU seconds, or those of another clock; MOST_S where it would have taken more."""
    subject = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "ignore")
    before = signal.signal(signal.SIGVTALRM, _stop)
    began = clock()
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        if methods <= {"match", "fullmatch"}:
            for method in methods:
                getattr(pattern, method)(subject)
        else:
            for _ in pattern.finditer(subject):
                pass
    except TooSlowError:
        return MOST_S
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return clock() - began


def too_slow(
    pattern: re.Pattern[Any], methods: set[str], num_chars: int, tries: int = TRIES
) -> str:
    """The beginning of a text whose cost grows with its square, in each try; else empty."""
    for text in texts(pattern):
        if num_chars == NUM_CHARS:
            shorter = text.of(NUM_CHARS // SHORTER)
            if cost_s(pattern, methods, shorter, time.perf_counter) < FAST_S:
                continue
        if all(grows(pattern, methods, text, num_chars) for _ in range(tries)):
            return repr(text.of(40))
    return ""


def grows(pattern: re.Pattern[Any], methods: set[str], text: Repeated, num_chars: int) -> bool:
    """Returns whether the text costs more than SLOW_S, and twice the text GROWTH times as much; or,
    for a pattern of BOUNDED, whether its longest text costs BOUNDED_S.
    """
    once = cost_s(pattern, methods, text.of(num_chars))
    if num_chars != NUM_CHARS:
        return once >= BOUNDED_S
    if once < SLOW_S or once >= MOST_S:
        return once >= MOST_S
    twice = cost_s(pattern, methods, text.of(2 * num_chars))
    return twice >= min(GROWTH * once, MOST_S)


@pytest.mark.parametrize("file", sorted(files_with_patterns()))
def test_every_pattern_is_linear(file: str) -> None:
    for use in collected()[0]:
        if use.file == file:
            num_chars = BOUNDED.get((file, use.name), NUM_CHARS)
            text = too_slow(use.pattern, use.methods, num_chars)
            assert not text, (use.name, use.pattern.pattern, text)


@pytest.mark.parametrize(
    "example", sorted({example for examples in EXAMPLES.values() for example in examples})
)
def test_every_pattern_that_a_call_makes_is_linear(example: str) -> None:
    assert not too_slow(re.compile(example), {"search"}, NUM_CHARS)


def test_each_pattern_that_a_call_makes_has_its_example() -> None:
    patterns, unknown = collected()
    expected = {file: len(examples) for file, examples in EXAMPLES.items()}
    assert Counter(file for file, _ in unknown) == expected, unknown
    assert BOUNDED.keys() <= {(use.file, use.name) for use in patterns}
    assert len(patterns) > 350


@pytest.mark.parametrize("quadratic", [r"\s+$", r"(\d+) times", r"<a>.*</a>", r"\bx[^y]*y"])
def test_a_quadratic_pattern_is_detected(quadratic: str) -> None:
    assert too_slow(re.compile(quadratic), {"search"}, NUM_CHARS, tries=1)


# ---- whole readers

MARKS: tuple[str, ...] = (
    *(" ", "\n", "\t", "a", "1", "-", "`", "```", "~~~", "ok 1", "not ok", "# SKIP", " > ", "--- "),
    *(
        "1/1 Test #1: ",
        ".",
        "from:",
        "\ufdd0",
        "\ufdd1",
        "PASSED",
        "```py\n",
        "a > ",
        " ✓ a",
        "####",
    ),
    *("Tests run: 1, Failures: 1, Errors: 1, Skipped: 1", "test a ... ", "####answer", "\\boxed{"),
)


def marked_texts() -> list[Repeated]:
    pairs = [(mark, other) for mark in MARKS for other in (" ", "\n", "a")]
    return [
        *(Repeated("", mark) for mark in MARKS),
        *(Repeated("", mark + other) for mark, other in pairs),
        *(Repeated(*pair) for pair in pairs),
    ]


def _gsm8k(text: str) -> object:
    return GSM8K.read({"question": "How many?", "answer": f"{text}\n#### 1"}, 0)


READERS: dict[str, Callable[[str], object]] = {
    **logs.PARSERS,
    "fences": guard.bare,
    "final answer": final_answer,
    "gsm8k": _gsm8k,
}


NUM_READ_CHARS = 20_000


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_whole_texts_is_linear(name: str) -> None:
    read = READERS[name]
    read("I counted 5 km")  # the first unit loads what knows units
    for text in marked_texts():
        assert not is_quadratic(read, text.of, NUM_READ_CHARS), text


def test_a_quadratic_reader_is_detected() -> None:
    text, read = Repeated("", " ", "a"), re.compile(r"\s+$").search
    assert any(growth.grows(read, text.of, NUM_READ_CHARS // 5) for _ in range(TRIES))
