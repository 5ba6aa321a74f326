r"""Closed forms: numbers spelled as one operation on numbers (`10/2`, `2^{10}`, `\binom52`).

A reference that is a number takes them under the grading `closed_form`, as long as the question
writes no expression of that value: there the form is what is to be worked out.

>>> from prorl.envs.answers.parse import parse
>>> [is_closed_form(parse(text)) for text in ("2^{10}", r"\sqrt[3]{27/8}", "2*5", "4!+1")]
[True, True, False, False]
>>> ten = parse("10")
>>> [poses(text, ten, parse(r"\binom52")) for text in (r"Evaluate $\binom{5}{2}$.", "2 of 5 are?")]
[True, False]
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prorl.envs.answers.evaluate import UndefinedError, close, number, symbols
from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.parse import Node, parse

MAX_PIECES = 40
"""The number of pieces of a question that are read: each costs a parse."""
_MAX_CHARS = 200
_OPERATIONS = frozenset(("/", "^", "root", "factorial", "binom", "neg"))
_ARITHMETIC = _OPERATIONS | frozenset("+-*")
_FORMULA = re.compile(
    r"(?<!\\)\$\$?((?:[^$\\]|\\.){1,400})\$\$?|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL
)
_BARE = re.compile(
    r"(?:√|\\[dt]?(?:binom|frac|sqrt)|sqrt|[(\d])"
    r"(?:[\d\s.()!^/*+{}\[\]×·÷−√-]|\\[dt]?(?:binom|frac|sqrt|cdot|times|div)(?![a-z])|sqrt)*"
)
"""Arithmetic that stands in a question without delimiters."""
_SPOKEN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), form)
    for pattern, form in (
        (r"(?:\$|(?<!\d))(\d+)\$? choose \$?(\d+)", r"\\binom{\1}{\2}"),
        (r"square root of \$?(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (r"cube root of \$?(\d+(?:\.\d+)?)", r"\\sqrt[3]{\1}"),
        (r"factorial of \$?(\d+)|(?:\$|(?<!\d))(\d+)\$? factorial", r"\1\2!"),
        (r"(?:\$|(?<!\d))(\d+(?:\.\d+)?)\$? squared", r"\1^2"),
        (r"(?:\$|(?<!\d))(\d+(?:\.\d+)?)\$? cubed", r"\1^3"),
        (
            r"(?:\$|(?<!\d))(\d+(?:\.\d+)?)\$? (?:raised )?to the (?:power (?:of )?)?\$?(\d+)",
            r"\1^{\2}",
        ),
        (r"(?:\$|(?<!\d))(\d+(?:\.\d+)?)\$? divided by \$?(\d+(?:\.\d+)?)", r"\1/\2"),
        (r"quotient (?:of|when) \$?(\d+)\$? (?:and|is divided by) \$?(\d+)", r"\1/\2"),
        (r"(?:\$|(?<!\d))(\d+(?:\.\d+)?)\$? times \$?(\d+(?:\.\d+)?)", r"\1*\2"),
        (r"half of \$?(\d+(?:\.\d+)?)", r"\1/2"),
        (r"(?<!\d)(\d+(?:\.\d+)?) ?\\?(?:%|percent) of \$?(\d+(?:\.\d+)?)", r"\1*\2/100"),
    )
)


def is_closed_form(node: Node) -> bool:
    """Returns whether a tree is a number, or powers, roots, quotients, factorials and binomial
    coefficients of numbers: no sum, difference or product, no symbol.
    """
    return node.op == "num" or (node.op in _OPERATIONS and all(map(is_closed_form, node.args)))


def poses(question: str, reference: Node, answer: Node) -> bool:
    """Returns whether a question asks to work out what a closed form leaves undone: it writes an
    expression of the reference's value, or the numbers of a quotient in the answer (`12/4` of 12
    liters in 4 minutes).
    """
    if _divides(answer, question):
        return True
    try:
        worth = number(reference)
    except (UnreadableError, UndefinedError, ArithmeticError):
        return True
    for node in _expressions(question):
        try:
            if close(number(node), worth):
                return True
        except (UnreadableError, UndefinedError, ArithmeticError):
            continue
    return False


def _divides(answer: Node, question: str) -> bool:
    if answer.op == "/" and all(arg.op == "num" for arg in answer.args):
        written = set(re.findall(r"\d+(?:\.\d+)?", question.replace("{,}", "").replace(",", "")))
        return all(str(arg.value) in written for arg in answer.args)
    return any(_divides(arg, question) for arg in answer.args)


def _expressions(question: str) -> Iterator[Node]:
    """Returns the arithmetic of a question, whole and in its parts."""
    for piece in _pieces(question):
        try:
            tree = parse(piece, units=False)
        except UnreadableError:
            continue
        level = [tree]
        while level:
            yield from (node for node in level if node.op in _ARITHMETIC and not symbols(node))
            level = [arg for node in level for arg in node.args]


def _pieces(question: str) -> list[str]:
    candidates = [next(filter(None, match.groups()), "") for match in _FORMULA.finditer(question)]
    candidates += [term for formula in candidates for term in _BARE.findall(formula)]
    candidates += _BARE.findall(_FORMULA.sub(" ; ", question))
    for pattern, form in _SPOKEN:
        candidates += [spoken.expand(form) for spoken in pattern.finditer(question)]
    pieces = (
        text.strip(" .,+*/(") if text.count("(") != text.count(")") else text for text in candidates
    )
    kept = (piece.strip(" .") for piece in pieces if not piece.strip(" .").isdigit())
    unique = [piece for piece in dict.fromkeys(kept) if piece and len(piece) <= _MAX_CHARS]
    return unique[:MAX_PIECES]
