r"""Final answers of mathematics: finding them in a text, reading them, comparing them.

| module | what |
|---|---|
| find | the final answer of a text |
| notation, words | spellings: LaTeX, Unicode, thousands; words around and instead of numbers |
| parse, values, tree | plain notation -> a tree |
| evaluate, sets, measures | what a tree is worth: numbers, real sets, units |
| closed, congruence | numbers spelled as one operation; congruences |
| compare, grade | whether an answer is the reference |

Pure functions of bounded work, no I/O. Nothing is guessed: an answer that has no reading is wrong,
a reference that has none is said to have none.
"""

from prorl.envs.answers.find import (
    MARKED,
    MAX_ANSWER_CHARS,
    Answer,
    AnswerFormat,
    final_answer,
    spell,
)
from prorl.envs.answers.grade import GRADINGS, Grading, grade

__all__ = [
    "GRADINGS",
    "MARKED",
    "MAX_ANSWER_CHARS",
    "Answer",
    "AnswerFormat",
    "Grading",
    "final_answer",
    "grade",
    "spell",
]
