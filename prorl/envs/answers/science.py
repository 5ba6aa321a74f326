"""Decides whether a final answer of science is the reference: a choice, a quantity or a short text.

A choice is right by its letter alone, by letter and text, or by its text; two letters are none.
Where the reference is a quantity, nothing but a quantity is right: in one unit within a tolerance,
without a unit in the wanted one; a whole number without a unit is exact, unless the task says
otherwise. Where it is words, texts are compared without articles and punctuation; capitals count
where they mean something (`Co`, `CO`); a formula (`mv^2/r`) is compared as mathematics.

>>> grade({"answer": "500 m"}, "How far?", "#### 0.5 km")[0]
True
>>> grade({"answer": "Co"}, "Which metal?", "#### CO")[0], grade({"answer": 1905}, "", "1915")[0]
(False, False)
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from prorl.envs.answers.find import MARKED, OTHER, final_answer, stated
from prorl.envs.answers.grade import grade as grade_mathematics
from prorl.envs.answers.measures import QuestionContext
from prorl.envs.answers.notation import decimal_commas
from prorl.envs.answers.numerals import numerals
from prorl.envs.answers.words import same_case
from prorl.envs.units import Quantity, equal, quantity

LETTERS = string.ascii_uppercase
TOLERANCE = 0.01
MAX_ANSWER_CHARS = 500

_DRESS = re.compile(
    r"(?:(?P<before>\\[A-Za-z]+) ?)?"
    r"\\(?:text|mathrm|textbf|mathbf|ce) ?\{(?P<inner>(?:[^{}]|\{[^{}]*\})*)\}"
    r"|(?<!\w)\*{2,9}|\*{2,9}(?!\w)|^\*|\*$|[`$]"
)
_LETTER = re.compile(
    r"(?:(?:so|thus|hence|therefore|i think|it's|it is|i (?:would )?(?:pick|choose)),? )*"
    r"(?:(?:the )?(?:option|choice|answer)(?: is)? ?:? ?)?[(\[]?([A-Za-z])[)\].:,]{0,3}(?: (.*))?",
    re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(
    r" (?:is|are) (?:the )?(?:correct|right|best)\b(?: (?:answer|option|choice|one))?"
)
_REASON = re.compile(r",? (?:because|since)\b.*")
_OTHERS = re.compile(r"\b(?:or|and) \(?[A-Z]\b|[,/&] ?\(?[A-Z]\b\)? ?$")
_MARKS = re.compile(r"[,;:\"()\[\]{}\\…“”«»]|(?<=[A-Za-z]{2})!$")
"""The marks that may stand around words; signs that mean something (`<`, `/`, `#`, `%`) are none of
them.
"""
_ARTICLES = re.compile(r"(?:^(?:[Tt]he|[Aa]n?)|\b(?:the|an?)) (?=\w)")
"""`A` in the middle is a name, as in `vitamin A`."""
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_FORMULAS = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"\^\{([^{}]*)\}(?!\w)", r"^\1"),
        (r"_\{?([^\W_]+)\}?", r"\1"),
        # of an ion; `NO^{2-}` is not `NO2-`
        (r"(\d|\b[A-Z][a-z]?)\^(\d?[+-])(?!\w)", r"\1\2"),
        (r"\^([+-])(?!\w)", r"\1"),
        (r"(?<![\w)\]])\^(\d+)(?=[A-Z])", r"\1"),
        (r"⇌|<?=>|<->|\\rightleftharpoons(?![a-zA-Z])", "⇌"),
        (r"-{1,2}>|[→⟶]|\\(?:long)?rightarrow(?![a-zA-Z])", "→"),
        (r"\bsp\^([23])", r"sp\1"),
        (r"\bsp3d\^2", "sp3d2"),
        (r"(?<=\d) ?(?:[–—−-]|\bto\b) ?(?=\d)", "-"),
    )
)
_NAME = re.compile(r"([A-Za-z]\w{0,2}) ?= ?([^=]+)$")
_ORBITAL = re.compile(r"(\d[spdf])\^?\{?(\d{1,2}?)\}?(?=\d[spdf]|\W|$)")
_OPERATION = re.compile(r"\\frac|sqrt|√|[=/^+*]|^-")
_COMMAND = re.compile(r"\\[a-zA-Z]+|sqrt|sin|cos|tan|exp|log|ln")
_NO_FORMULA = re.compile(r"[A-Za-z]\d|[-+]\}?$|[>→⇌]|[^\W\d]{4}")
"""A sign of chemistry, or words: `2H2 + O2`, `Na+`, `and/or`."""
_LABEL = re.compile(r"([^\W\d_]\w{0,3}) ?[=≈] ?(?=[-+.\d])")
_ACIDITY = re.compile(r"(?:[Tt]he )?pH ?(?:=|of|is|:|≈)? ?(?=-?\d)")
_COUNT = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+")


def grade(data: Mapping[str, Any], question: str, text: str) -> tuple[bool, str, str, str]:
    """Returns (right, the rule that decided, the answer that was found, how)."""
    answer, method = final_text(text)
    expected = str(data["answer"])
    if len(_CALLED_RIGHT.findall(text)) == 1 and data.get("choices"):
        answer = _CALLED_RIGHT.sub("", answer)
    right, path = _compare(data, question, expected, answer)
    is_sentence = (
        method == "last line" and not OTHER.search(answer) and not set("=≈:") & set(answer)
    )
    if not right and is_sentence:
        for behind in stated(answer):
            right, path = _compare(data, question, expected, behind)
    return right, path, answer[:200], method


def final_text(text: str) -> tuple[str, str]:
    """Returns (the final answer, how it was found).

    As in mathematics, but an unmarked one is the last line as it stands, with its unit.

    >>> final_text("So v = 3.\\n#### 3 m/s"), final_text("The answer is (B).")
    (('3 m/s', '####'), ('(B).', 'answer is'))
    """
    answer, method = final_answer(text)
    if method not in MARKED:
        lines = [line for line in text.splitlines() if line.strip()]
        answer, method = (lines[-1], "last line") if lines else ("", "nothing")
    if len(answer) > 2 * MAX_ANSWER_CHARS:
        return answer, method
    return _DRESS.sub(_undressed, " ".join(answer.split())).strip(" 。"), method


def _undressed(dress: re.Match[str]) -> str:
    """The text of a `\\text{}`; the name of a command before it ends there."""
    return " ".join(filter(None, (dress["before"], dress["inner"])))


def _compare(
    data: Mapping[str, Any], question: str, expected: str, answer: str
) -> tuple[bool, str]:
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False, "no usable answer"
    choices: Sequence[str] = data.get("choices", [])
    if choices:
        return choice_of(answer, choices) == expected, "choice"
    path = "text"
    for reference in (expected, *data.get("aliases", [])):
        acidity = _ACIDITY.match(reference) is not None
        right = quantity(_ACIDITY.sub("", reference))
        if right is None:
            if is_same_text(reference, answer):
                return True, "text"
            is_formula = _OPERATION.search(reference) and not _NO_FORMULA.search(
                _COMMAND.sub(" ", reference)
            )
            named = _NAME.match(answer) if "=" not in reference else None
            if named and named[1] not in reference:
                answer = named[2]
            if is_formula and grade_mathematics(reference, answer, question)[0]:
                return True, "mathematics"
            continue
        path = "quantity"
        tolerance = float(data.get("tolerance", TOLERANCE))
        if "tolerance" not in data and not right.has_unit and not acidity:
            tolerance = 0.0 if _COUNT.fullmatch(reference.strip()) else tolerance
        actual = _answer_quantity(answer, right, QuestionContext(question, reference))
        if actual is None or (
            actual.has_unit and not right.has_unit and not _is_share(actual, right)
        ):
            continue
        if equal(actual, right, max(tolerance, 1e-9)):
            return True, path
    return False, path


def _is_share(actual: Quantity, expected: Quantity) -> bool:
    """Returns whether percents may say a number: 25 % are 0.25, 200 % are no 2."""
    return str(actual.unit) == "percent" and abs(expected.value) <= 1


def _answer_quantity(answer: str, expected: Quantity, speech: QuestionContext) -> Quantity | None:
    """Returns the quantity that an answer is.

    Where the reference has no unit, one that the question speaks of is left out.
    """
    answer = numerals(decimal_commas(_ACIDITY.sub("", answer)))
    if (label := _LABEL.match(answer)) and (
        expected.has_unit or speech.may_name_answer(label[1])
        if len(label[1]) == 1
        else speech.labels(label[1])
    ):
        answer = answer[label.end() :]
    if str(expected.unit) in ("degree_Celsius", "degree_Fahrenheit"):  # `C` is no coulomb there
        answer = re.sub(r"(?<=\d) ?([CF])$", r" deg\1", answer)
    amount = quantity(answer)
    if expected.has_unit or not speech.has_question or (amount is not None and not amount.has_unit):
        return amount
    number = re.match(r"[^A-Za-z°%$]*\d", answer)
    if number is None or not speech.allows(answer[number.end() :].strip(" .")):
        return amount
    return quantity(number[0])


def choice_of(answer: str, choices: Sequence[str]) -> str:
    """Returns the letter of the choice that an answer names; empty when it names none or several.

    >>> texts = "B", "(b) blue", "Blue.", "Option B.", "A or B", "B) red", "A, B"
    >>> [choice_of(text, ["red", "blue"]) for text in texts]
    ['B', 'B', 'B', 'B', '', '', '']
    """
    by_text = [
        letter for letter, text in zip(LETTERS, choices, strict=False) if _is_choice(text, answer)
    ]
    if len(by_text) == 1:
        return by_text[0]
    answer = _REASON.sub("", " ".join(answer.split()))
    match = _LETTER.fullmatch(answer)
    if match is None or _OTHERS.search(answer):
        return ""
    letter, rest = match[1].upper(), match[2] or ""
    index = LETTERS.index(letter)
    if index >= len(choices) or (words(rest) and not _is_choice(choices[index], rest)):
        return ""
    return letter


def _is_choice(choice: str, answer: str) -> bool:
    if is_same_text(choice, answer):
        return True
    expected, actual = quantity(choice), quantity(answer)
    if expected is None or actual is None or expected.has_unit is not actual.has_unit:
        return False
    return equal(actual, expected, 1e-9)


def is_same_text(reference: str, answer: str) -> bool:
    """Returns whether two texts are equal but for punctuation, articles and capitals without a
    meaning.

    >>> is_same_text("oxygen", "The Oxygen."), is_same_text("vitamin A", "vitamin")
    (True, False)
    >>> is_same_text("H2O", "H₂O"), is_same_text("HF", "Hf"), is_same_text("HCl", "HCl")
    (True, False, True)
    """
    if "[" in reference:
        return "".join(_typed(reference).split()) == "".join(_typed(answer).split())
    if same_case(plain(reference), plain(answer)):
        return True
    # of `A horizon` the letter is a name
    return not reference.startswith("A ") and same_case(words(reference), words(answer))


def words(text: str) -> str:
    """A text without articles and punctuation."""
    return plain(_ARTICLES.sub("", " ".join(text.split())))


def plain(text: str) -> str:
    """A text without punctuation, as formulas are typed; one that is nothing else stays."""
    flat = re.sub(r"\b[pP](?= ?[<>=])", "p", _typed(text))
    rest = " ".join(_MARKS.sub(" ", flat).split()).rstrip(".").strip()
    return rest or text.strip()


def _typed(text: str) -> str:
    """Returns formulas, reactions and shells of electrons in one spelling."""
    flat = _RAISED.sub(lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
    flat = re.sub("[’‘]", "'", unicodedata.normalize("NFKC", flat))
    if len(_ORBITAL.findall(flat)) > 1:
        flat = _ORBITAL.sub(r"\1\2 ", flat)
    for pattern, ours in _FORMULAS:
        flat = pattern.sub(ours, flat)
    return "".join(flat.split()) if set("→⇌") & set(flat) else flat
