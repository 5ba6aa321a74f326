r"""The final answer in a text: a pure function, linear in its text.

It is what stands behind the last `####` or in the last `\boxed{}`, whichever comes later; else what
follows the last "answer is"; else what the last sentence says, or its last number. A later answer
replaces an earlier one, except that boxes joined by "and", "or" or a comma are one list.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from prorl.envs.answers.words import bare, is_hedged, strip_agreement_words
from prorl.envs.units import parse_unit

MAX_ANSWER_CHARS = 1000
"""A longer final answer is no answer; it bounds what a grader can be made to chew on."""

MARKED = ("####", "boxed", "answer is")
"""Ways to find an answer that says of itself that it is one."""
_MAX_BOXES = 20
_MAX_UNIT_WORDS = 4
_SCALES = ("hundred", "thousand", "million", "billion", "trillion", "dozen")
_MARK = re.compile(r"####[ \t]*([^\n]*)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
_JOINT = re.compile(r"[\s$,;]*(?:and|or|,|;)[\s$]*|[\s$]*,[\s$]*")
_ANSWER_IS = re.compile(
    r"(?:(?:\banswers?|\bans|\bresult|\bsolutions?|\boption|\bchoice)\b[^\w\n=]{0,6}"
    r"(?:to (?:the|this) (?:question|problem) )?(?:(?:is|are|was|equals)\b|[=:：])"
    r"|(?:答案|答え)[*]{0,3}(?:[是为:：]|は)|故选)[ \t]*[:：]?[*\s]*"
    r"(?:(?:\\\[|\$\$)\s*\n\s*)?([^\n]+)",
    re.IGNORECASE,
)
_ALSO = re.compile(
    r"\s*(?:or|alternatively|perhaps|maybe)\b.{0,200}\d"
    r"|.{0,200}\b(?:could|might|may)(?: also)? be\b",
    re.IGNORECASE,
)
OTHER = re.compile(
    r"\b(?:half|twice|double|triple|thrice|third|quarter|tenth|root|square|squared|cube|reciprocal"
    r"|inverse|opposite|negative|minus|plus|times|trap|wrong|naive|tempting|incorrect|false|other"
    r"|than|not|never|no|cannot|doubt)\b|n't\b",
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"[\s*_:]*(?:the )?(?:final )?(?:answer|solution|result)[\s*_:]*", re.IGNORECASE
)
_EACH = re.compile(
    r"(?:^|\s)([A-Za-z](?:_?\d|[₀-₉])?\s*=\s*+[^=]{1,80}"
    r"(?:\bor\b|\band\b|,)\s*[A-Za-z](?:_?\d|[₀-₉])?\s*=[^=]{1,80})$"
)
"""Several letters with their values."""
_END = re.compile(r"(?<=[^\d\s.])[.!?](?=\s+[A-Z\\$])|(?<=\d)[.!?](?=\s+[A-Z\\$])|;\s")
_COPULA = re.compile(
    r"(?:\b(?:is|are|equals?|gives?|obtains?|gets?|be|becomes?|makes?|yields?)\b"
    r"|(?<![<>!/])=(?!>)|≈|:\s)"
)
_LEADING = re.compile(r"\b(?:is|are|be|gets?|gives?|becomes?|equation)\b|:\s")
_BRACKETS = re.compile(r"\([^()]*\)|\{[^{}]*\}")
_DENIED = re.compile(r"(?:\b(?:not|never|cannot|doubt|hardly|unlikely)|n't)\b(?: [\w']+){0,3} ?$")
_BOLD = re.compile(r"(?<!\w)\*\*|\*\*(?!\w)")
_MATHS = re.compile(
    r"(?<!\\)\$\$?((?:[^$\n\\]|\\.){1,400})\$\$?|\\\(([^\n]{1,400}?)\\\)|\\\[(.{1,400}?)\\\]",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"\d{1,2}:\d\d ?[aApP]\.?[mM]\b"
    r"|[-+−]?\$?(?:\d+ (?=\d+/\d))?(?:\d[\d,]*\d|\d)?(?:\.\d+)?(?:\s{0,9}/\s*\d+)?%?"
)
_THOUGHT = re.compile(r"<(/?)(?:think(?:ing)?|thoughts?|reasoning)>", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.{1,1000}?)</answer>", re.DOTALL | re.IGNORECASE)
_NOTATION = re.compile(
    r"(?:[\d\s.,;:()\[\]{}+\-−*/^_&'<>≤≥≠=∈|!$%°π∞√±∪∩·×÷²³]|\\(?:begin|end)\{[a-z]?matrix\}"
    r"|\\[A-Za-z]+|\\[\\,;!{}]"
    r"|(?<![A-Za-z])(?:[A-Za-z]|and|or|sqrt|pi|sin|cos|tan|log|ln|exp)(?![A-Za-z]))+"
)
"""No word but those that join answers: all of it is the answer."""
_TUPLE = re.compile(r"(?<!\w)[(\[][^()\[\]]{0,200},[^()\[\]]{0,200}[)\]](?=[.\s*]*$)")
_EXCLAIMED = re.compile(r"(?<=\d)!+$")


class Answer(NamedTuple):
    """A final answer and how it was found."""

    text: str
    method: str
    """`####`, `boxed`, `answer is`, `last sentence`, `last number` or `none`."""


def final_answer(text: str) -> Answer:
    r"""Returns the final answer of a text.

    >>> texts = "48/2 = 24\n#### 24", r"so \boxed{\frac{1}{2}}", "So the answer is 12."
    >>> [final_answer(text).text for text in texts], final_answer("First 3, then 7").method
    (['24', '\\frac{1}{2}', '12.'], 'last number')
    """
    text = without_open_thought(text).rstrip()
    if tagged := _TAG.match(text, max(text.lower().rfind("<answer>"), 0)):
        return Answer(_boxes(tagged[1])[1] or tagged[1].strip(), "answer is")
    box_at, boxed = _boxes(text)
    mark_at, marked = _marked(text)
    if marked and mark_at > box_at:
        inner = _boxes(marked)[1]
        return Answer(inner or marked, "####")
    if boxed:
        return Answer(boxed, "boxed")
    if statement := _answer_statement(text):
        return Answer(statement, "answer is")
    return _unmarked(text)


AnswerFormat = Literal["any", "boxed", "last_line"]
FORMATS: tuple[AnswerFormat, ...] = get_args(AnswerFormat)
"""The places where an answer may stand: anywhere, as above; in the last box; on the last line."""


def in_format(text: str, answer_format: str) -> str:
    r"""Returns the part of a text that may hold its answer, by one of FORMATS; empty where nothing
    does.

    >>> in_format("So \\boxed{4}, I think.", "boxed"), in_format("Is it 4?", "boxed")
    ('\\boxed{4}', '')
    >>> in_format("4 is right.\n#### 4\n", "last_line")
    '#### 4'
    """
    text = without_open_thought(text)
    if answer_format == "boxed":
        boxed = _boxes(text)[1]
        return rf"\boxed{{{boxed}}}" if boxed else ""
    if answer_format == "last_line":
        return next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return text


def spell(answer: str, answer_format: str) -> str:
    r"""An answer as a policy writes it in a format.

    >>> [spell("4", answer_format) for answer_format in FORMATS]
    ['#### 4', '\\boxed{4}', '4']
    """
    spelled = {"boxed": rf"\boxed{{{answer}}}", "last_line": answer}
    return spelled.get(answer_format, f"#### {answer}")


def without_open_thought(text: str) -> str:
    """A text up to a thought that was cut off: nothing in it is an answer."""
    *_, last = (None, *_THOUGHT.finditer(text))
    return text if last is None or last[1] else text[: last.start()]


def _marked(text: str) -> tuple[int, str]:
    """Returns (where, what) behind the last `####`; a heading's answer is on the line below."""
    last_mark: tuple[int, str] = (-1, "")
    for mark in _MARK.finditer(text):
        content = mark[1].strip()
        if _HEADING.fullmatch(content):
            below = (
                text[mark.end() : mark.end() + 2 * MAX_ANSWER_CHARS]
                .lstrip()
                .partition("\n")[0]
                .strip()
            )
            content = "" if below.startswith("#") else below
        if content.strip("*_$ "):
            last_mark = (mark.start(), content)
    return last_mark


def _boxes(text: str) -> tuple[int, str]:
    """Returns (position, content) of the last box, with the boxes before it that it is joined
    to.
    """
    # the last ones: a text of nothing but boxes costs no more than they do
    marks = list(_BOX.finditer(text))[-_MAX_BOXES:]
    spans = [span for mark in marks if (span := _box(text, mark.start(), mark.end()))]
    # of nested boxes the innermost is the last
    if not spans or not spans[-1][2]:
        return -1, ""
    where, _, last = spans[-1]
    parts, place = [last], where
    for start, end, inner in reversed(spans[:-1]):
        if end > place or not _JOINT.fullmatch(text[end:place]):
            break
        parts, place = [inner, *parts], start
    return where, ", ".join(parts)


def _box(text: str, start: int, content_at: int) -> tuple[int, int, str] | None:
    """(start, end, what) of the box at `start`; None where its brace is not closed."""
    if text[content_at] != "{":
        short = re.match(r"[^\s$.,]+", text[content_at:])
        return (start, content_at + len(short[0]), short[0]) if short else (start, 0, "")
    end = _closing(text, content_at)
    return (start, end + 1, text[content_at + 1 : end].strip()) if end else None


def _closing(text: str, start: int) -> int:
    """The place of the brace that closes the one at `start`; 0 when it is too far or none."""
    depth = 0
    for index in range(start, min(len(text), start + MAX_ANSWER_CHARS + 2)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return 0


def _answer_statement(text: str) -> str:
    """Returns what follows the last "the answer is" of a text, to the end of its sentence."""
    *_, last = (None, *_ANSWER_IS.finditer(text))
    if last is None:
        return ""
    before = re.split(r"[.!?:;,\n]", text[max(0, last.start() - 200) : last.start()])[-1]
    if OTHER.search(before):  # `half of the answer is 18`: not the answer
        return f"{before.strip()} {last[0]}"[:MAX_ANSWER_CHARS]
    rest, *others = _END.split(last[1][: 2 * MAX_ANSWER_CHARS])
    for other in others:
        if again := _ANSWER_IS.search(other):
            rest = again[1]
        elif _ALSO.match(other):
            rest = f"{rest} {other}"
    if '":' in last[0][: last.start(1) - last.start()]:  # JSON
        rest = rest.rstrip("}, ").strip('"')
    return _EXCLAIMED.sub("", rest.strip().lstrip("} "))


def _unmarked(text: str) -> Answer:
    """Returns the answer of a text that marks none: of its last sentence."""
    sentence = _last_sentence(text)
    if (word := strip_agreement_words(sentence)) != sentence:
        return Answer(word, "last sentence")
    maths = _formulas(sentence)
    if maths and not is_hedged(_MATHS.sub(" ", sentence)):
        return Answer(maths, "last sentence")
    if each := _EACH.search(_BOLD.sub("", sentence)):
        return Answer(each[1].strip(" *"), "last sentence")
    if equation := _equation(sentence):
        return Answer(equation, "last sentence")
    if behind := stated(sentence):
        return Answer(behind[0], "last sentence")
    if is_hedged(sentence):
        return Answer(sentence[:MAX_ANSWER_CHARS], "last sentence")
    if _NOTATION.fullmatch(sentence):
        return Answer(sentence.strip(), "last sentence")
    if (point := _TUPLE.search(sentence)) and _NOTATION.fullmatch(point[0]):
        return Answer(point[0], "last sentence")
    numbers = [match[0] for match in _NUMBER.finditer(sentence) if any(map(str.isdigit, match[0]))]
    if numbers and len(sentence.split()) > 1:
        return Answer(_with_unit(numbers[-1], sentence), "last number")
    words = bare(sentence)
    is_short = words and len(words.split()) <= 4
    return Answer(words, "last sentence") if is_short else Answer("", "none")


def _formulas(sentence: str) -> str:
    """Returns the last formula and the alternatives before it: `$x = 2$ or $x = 3$`."""
    parts: list[str] = []
    place = len(sentence)
    for match in reversed(list(_MATHS.finditer(sentence))):
        part = next(filter(None, match.groups()), "").strip()
        between = sentence[match.end() : place]
        if parts and not (
            _JOINT.fullmatch(between)
            and (between.strip() != "," or part.partition("=")[0] == parts[0].partition("=")[0])
        ):
            break
        parts, place = [part, *parts], match.start()
    return ", ".join(parts)


def _equation(sentence: str) -> str:
    """`x + y = 5`, which is no 5: of an equation without a name alone on its left."""
    left, _, right = sentence.strip(" *.$").rpartition("=")
    left = _LEADING.split(left)[-1].strip(" *$")
    is_named = not re.search(r"[-+−]", _BRACKETS.sub("", left)) or not re.search("[A-Za-z]", left)
    if is_named or not _NOTATION.fullmatch(left) or not _NOTATION.fullmatch(right):
        return ""
    return f"{left} ={right}"


def _with_unit(number: str, sentence: str) -> str:
    """The last number with the unit or the million that stands behind it."""
    behind = re.split(r"[.,;:*]", sentence[sentence.rfind(number) + len(number) :])[0].split()
    if behind and behind[0].lower() in _SCALES:
        return f"{number} {behind[0]}"
    units = (" ".join(behind[:size]) for size in range(min(len(behind), _MAX_UNIT_WORDS), 0, -1))
    return " ".join([number, *filter(parse_unit, units)][:2])


def _last_sentence(text: str) -> str:
    """The last sentence of a text's last line that says anything; empty where there is none."""
    lines = [line for line in text.splitlines() if line.strip("*_` \t")]
    if not lines:
        return ""
    sentence = _END.split(lines[-1][-2000:])[-1].strip() or lines[-1][-2000:]
    return _EXCLAIMED.sub("", sentence) if len(sentence.split()) > 3 else sentence


def stated(sentence: str) -> tuple[str, ...]:
    """Returns what stands behind the verb or equals sign, where that can be an answer; else
    nothing.
    """
    copula = _COPULA.search(sentence, max(sentence.rfind("="), 0))  # none stands before a sign
    if copula is None or _DENIED.search(sentence[: copula.start()]):
        return ()
    rest = sentence[copula.end() :].strip(" *")
    if rest.strip(" .!") in ("", "not"):
        return ()
    is_mathematics = re.match(r"[-+−$\\(\[{.]*\d|[\\$(\[{]", rest)
    return (rest,) if is_mathematics or len(rest.split()) <= 3 or is_hedged(rest) else ()
