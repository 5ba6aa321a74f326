"""The trees that a text may be read as, and whether two texts have one that is the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prorl.envs.answers.arithmetic import UndefinedError
from prorl.envs.answers.compare import same
from prorl.envs.answers.notation import (
    FUNCTIONS,
    UnreadableError,
    decimal_commas,
    join_thousands,
)
from prorl.envs.answers.numerals import numerals
from prorl.envs.answers.parse import parse
from prorl.envs.answers.tree import Node
from prorl.envs.answers.words import bare, doubtful, only_number

_ROUGHLY = re.compile(
    r"^(.+?)\s*[,;(]?\s*(?:\bor |which is |i\.e\. )?"
    r"(?:≈|\\approx(?![a-z])|approximately|approx\.?|about|roughly)\s*([^()]+?)\)?$"
)
_LABEL = re.compile(
    r"^(?:m?\s*\\angle\s*[A-Z]{1,3}|\|?(?:\\(?:overline|vec|overrightarrow)\s*\{)?[A-Z]{2,3}\}?\|?"
    r"|\\?(?:Pr?|E|Var|mathbb\{?[PE]\}?)\s*[(\[][^=]*[)\]]"
    r"|(?:\\text\{[^{}]*\}\s*|[A-Za-z][A-Za-z']*\s+){0,6}(?:\\text\{[^{}]*\}|[A-Za-z][A-Za-z']{2,}))"
    r"\s*(?:=|≈|\\approx)\s*"
)
_DEGREES = re.compile(r"\^?\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|°|\\?\bdegrees?\b")
_PI = re.compile(r"\\pi(?![a-zA-Z])|π|\bpi\b")


def same_mathematics(reference: str, answer: str) -> bool | None:
    """Whether both may be read as equal mathematics; None where the reference has no value."""
    wanted = list(_readings(reference, is_reference=True))
    if not wanted:
        return None
    lists = any(node.op in ("list", "sequence") for node in wanted)
    for text in (answer, *_turned(reference, answer)):
        for node in _readings(text, is_list=lists):
            for one in wanted:
                try:
                    if same(one, node):
                        return True
                except (UnreadableError, UndefinedError, ArithmeticError):
                    continue
    return False if _has_value(wanted) else None


def _turned(reference: str, answer: str) -> tuple[str, ...]:
    """An angle in degrees as one in radians that tell of pi, and the other way round."""
    wanted, given = bool(_DEGREES.search(reference)), bool(_DEGREES.search(answer))
    if given and not wanted and _PI.search(reference):
        return (f"({_DEGREES.sub('', bare(answer))})*\\pi/180",)
    if wanted and not given and _PI.search(answer):
        return (f"({bare(answer)})*180/\\pi",)
    return ()


def _has_value(readings: list[Node]) -> bool:
    """Whether a reference is equal to itself: has a value that others can be compared with."""
    for node in readings:
        try:
            if same(node, node):
                return True
        except (UnreadableError, UndefinedError, ArithmeticError):
            continue
    return False


def parsed(text: str, *, units: bool = True, attached_units: bool = True) -> Node | None:
    """The tree of a text; None where it has none."""
    try:
        return parse(text, units=units, attached_units=attached_units)
    except (UnreadableError, RecursionError):
        return None


def _readings(text: str, *, is_reference: bool = False, is_list: bool = False) -> Iterator[Node]:
    """The trees that a text may be read as, the likeliest first, without repetitions."""
    if not is_reference and doubtful(text):
        return
    found: list[Node] = []
    texts = [text] if is_reference else _variants(text)
    spellings = [one for part in texts for one in _spellings(part, is_list or is_reference)]
    for spelled in dict.fromkeys(spellings):
        for units in (True, False):
            node = parsed(spelled, units=units, attached_units=not is_reference)
            if node is not None and node not in found:
                found.append(node)
                yield node
    plain = "" if found or is_reference else only_number(text)
    if plain and (node := parsed(join_thousands(plain))) is not None:
        yield node


def _variants(text: str) -> list[str]:
    """An answer without lead-ins; without its label (`Area = `); both sides of an `≈`."""
    short = bare(text)
    found = [short]
    if (rough := _ROUGHLY.match(short)) and "=" not in rough[1]:
        found += [rough[1], rough[2]]
    label = _LABEL.match(short)
    if label and not set(re.findall(r"[a-z]+", label[0])) & FUNCTIONS:
        found.append(short[label.end() :])
    return found


def _spellings(text: str, is_list: bool) -> list[str]:
    """A text with its thousands joined, its number words in digits, its decimal commas."""
    joined = join_thousands(text.replace("{,}", ",").replace("\\!", ""))
    joined = re.sub(r"(?<=\d)(?:\\[,;: ]|~|\u202f|\u2009|\u00a0)(?=\d{3}(?!\d))", "", joined)
    found = [numerals(joined)]
    if joined != text and is_list:
        found.append(text)
    if (commas := decimal_commas(text)) != text and not is_list:
        found.append(commas)
    return list(dict.fromkeys(found))
