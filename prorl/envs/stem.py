"""Questions of science, technology, engineering and mathematics.

The answer is a choice, a quantity with its unit or a short text.

| `task.data` | |
|---|---|
| answer | letter, index or text of the right choice; else a quantity (`units.py`) or short text |
| choices | texts; shown as A, B, C ... below the prompt |
| aliases | further right texts |
| tolerance | relative, of numbers (0.01) |
| solution | kept for people |

The answer is what follows the last `####`, is in the last `\\boxed{}`, or follows the last "answer
is"; else the last line. A choice is right by its letter alone, by letter and text, or by its text;
two letters are none. Quantities are compared in one unit; another dimension is wrong, no unit at
all is taken for the right one. Texts are compared without case, articles and punctuation. Nothing
is guessed: what none of these settles is wrong, and the log says how it was read.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from prorl.envs.answers import MARKED, final_answer
from prorl.envs.base import BaseEnv, Solution
from prorl.envs.tools import PYTHON
from prorl.envs.units import equal, quantity
from prorl.errors import TaskError
from prorl.rubric import Rubric, reward
from prorl.types import Json, Judgement, Message, Task, ToolCall

LETTERS = string.ascii_uppercase
TOLERANCE = 0.01
MAX_ANSWER_CHARS = 500

_DRESS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}|\*{2,}|^\*|\*$|[`$]")
_LETTER = re.compile(
    r"(?:option|choice|answer)?\s*[(\[]?([A-Za-z])[)\].:,]*(?:\s+(.*))?", re.DOTALL
)
_OTHERS = re.compile(r"\b(?:or|and)\s+\(?[A-Z]\b|[,/&]\s*\(?[A-Z]\b\)?\s*$")
_MARKS = re.compile(r"[,;:!?\"'()\[\]{}\\_*~…‘’“”«»]")
"""What may stand around words; signs that mean something (`<`, `/`, `#`, `%`) are none of them."""
_ARTICLES = re.compile(r"(?:^(?:[Tt]he|[Aa]n?)|\b(?:the|an?))\s+(?=\w)")
"""`A` in the middle is a name, as in `vitamin A`."""


@reward("correct")
def correct(task: Task, artefact: bytes) -> Judgement:
    """1 for the right choice, quantity or text, else 0."""
    answer, found = final_text(artefact.decode("utf-8", "replace"))
    wanted = _answer(task)
    right, path = _compare(task, answer, wanted)
    said = f"answer {answer[:200]!r} ({found}), reference {wanted!r}"
    return Judgement(float(right), f"{said}: {'equal' if right else 'different'} by {path}")


class StemEnv(BaseEnv):
    """A Python tool in RUN; EVAL needs no sandbox."""

    name = "stem"
    system = (
        "Answer the question. Reason step by step; use the python tool for arithmetic. End with the"
        " final answer alone on a last line, in the form `#### answer`: the letter of a choice, a"
        " number with its unit, or a few words."
    )
    offers = (PYTHON,)
    rubric = Rubric((correct, 1.0))

    def check(self, task: Task) -> None:
        """The answer is there, and among the choices where there are some."""
        super().check(task)
        choices, aliases = task.data.get("choices", []), task.data.get("aliases", [])
        for name, value in (("choices", choices), ("aliases", aliases)):
            if not isinstance(value, list) or not all(
                isinstance(one, str) and one.strip() for one in value
            ):
                raise TaskError(
                    f"task {task.task_id!r}: data.{name} is {value!r}"[:300], "a list of texts"
                )
        if len(choices) == 1 or len(choices) > len(LETTERS):
            raise TaskError(f"task {task.task_id!r}: {len(choices)} choices", "2 to 26")
        if not 0 <= float(task.data.get("tolerance", TOLERANCE)) < 1:
            raise TaskError(f"task {task.task_id!r}: data.tolerance", "a share below 1")
        _answer(task)

    def messages(self, task: Task) -> tuple[Message, ...]:
        """How to answer; the question, with its choices by letter."""
        choices = task.data.get("choices", [])
        lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False)]
        asked = "\n\n".join(filter(None, (task.prompt, "\n".join(lines))))
        return (Message(role="system", content=self.system), Message(role="user", content=asked))

    def reference(self, task: Task) -> Solution:
        """The answer, printed once and said."""
        answer = _answer(task)
        return Solution((ToolCall("python", {"code": f"print({answer!r})"}),), f"#### {answer}")


def final_text(text: str) -> tuple[str, str]:
    """(the final answer, how it was found).

    As in mathematics, but an unmarked one is the last line as it stands, with its unit.

    >>> final_text("So v = 3.\\n#### 3 m/s"), final_text("The answer is (B).")
    (('3 m/s', '####'), ('(B).', 'answer is'))
    """
    answer, found = final_answer(text)
    if found in MARKED:
        return _bare(answer), found
    lines = [line for line in text.splitlines() if line.strip()]
    return (_bare(lines[-1]), "last line") if lines else ("", "nothing")


def _bare(text: str) -> str:
    return _DRESS.sub(lambda found: found[1] or "", text).strip()


def _answer(task: Task) -> str:
    """The reference: a choice's letter, else the answer as text. Raises TaskError."""
    answer: Json = task.data.get("answer")
    choices: Sequence[str] = task.data.get("choices", [])
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise TaskError(f"task {task.task_id!r}: data.answer is {answer!r}", "a text or a number")
    if not choices:
        return str(answer).strip()
    letters = LETTERS[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str) and answer.strip().upper() in tuple(letters):
        return answer.strip().upper()
    if answer in choices:
        return letters[choices.index(str(answer))]
    raise TaskError(
        f"task {task.task_id!r}: data.answer is {answer!r}",
        f"one of {', '.join(letters)}, an index from 0, or the text of a choice",
    )


def _compare(task: Task, answer: str, wanted: str) -> tuple[bool, str]:
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False, "no usable answer"
    choices: Sequence[str] = task.data.get("choices", [])
    if choices:
        return choice_of(answer, choices) == wanted, "choice"
    texts = (wanted, *task.data.get("aliases", []))
    if any(is_same_text(answer, text) for text in texts):
        return True, "text"
    tolerance = float(task.data.get("tolerance", TOLERANCE))
    given = quantity(answer)
    for text in texts:
        right = quantity(text)
        if right is not None:
            return given is not None and equal(given, right, tolerance), "quantity"
    return False, "text"


def choice_of(answer: str, choices: Sequence[str]) -> str:
    """The letter of the choice that an answer names; empty when it names none or several.

    >>> texts = "B", "(b) blue", "Blue.", "A or B", "B) red"
    >>> [choice_of(text, ["red", "blue"]) for text in texts]
    ['B', 'B', 'B', '', '']
    """
    by_text = [
        letter for letter, text in zip(LETTERS, choices, strict=False) if is_same_text(answer, text)
    ]
    if len(by_text) == 1:
        return by_text[0]
    found = _LETTER.fullmatch(answer.strip())
    if found is None or _OTHERS.search(answer):
        return ""
    letter, rest = found[1].upper(), found[2] or ""
    index = LETTERS.index(letter)
    if index >= len(choices) or (words(rest) and not is_same_text(rest, choices[index])):
        return ""
    return letter


def is_same_text(one: str, other: str) -> bool:
    """Whether two texts are equal but for case, punctuation and articles.

    >>> is_same_text("The Oxygen.", "oxygen"), is_same_text("vitamin", "vitamin A")
    (True, False)
    """
    return words(one) == words(other) or plain(one) == plain(other)


def words(text: str) -> str:
    """A text without case, articles and punctuation."""
    return plain(_ARTICLES.sub("", text.strip()))


def plain(text: str) -> str:
    """A text without case and punctuation; one that is nothing else stays."""
    rest = " ".join(_MARKS.sub(" ", text.casefold()).split()).rstrip(".").strip()
    return rest or text.strip()
