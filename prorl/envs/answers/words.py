r"""The words around and instead of mathematics: lead-ins, doubts, plain texts.

Pure functions over short texts.
"""

from __future__ import annotations

import re

from prorl.envs.answers.notation import TEXT_COMMANDS

_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|finally|and so|i think|we|i|you|get|gets|have|find|obtain"
    r"|conclude|that|the|my|our|final|correct|right|answer|ans|result|value|solutions?|total|sum"
    r"|is|are|be|equals?|would be|will be|must be|it|this|there|there are|a total of|exactly"
    r"|approximately|about|around|roughly|approx\.?|simply|just|only|given by|equal to|option"
    r"|choice)(?=[\s:,*=$\\(]|$)[\s:,*]*"
    r"|(?:[:=≈]|\\approx|\\therefore|\\implies|\\Rightarrow|=>|->|→|∴)\s*)+",
    re.IGNORECASE,
)  # fmt: skip
_DOUBT = re.compile(
    r"(?<!\\)\b(?:not|never|neither|nor|no|none|unknown|least|most|or more|or less|than|between"
    r"|(?:over|under|above|below)(?=\s+[\d$\\])|except|almost|nearly|wrong|incorrect|false|guess(?:ed)?"
    r"|maybe|perhaps|either|both|any|idea|cannot|can't|don't|doesn't|isn't|aren't|wasn't|unsure"
    r"|(?<=\s)minus|plus|times|divided|factorial|mod|modulo|root|square root|reciprocal"
    r"|inverse|instead|versus|vs|unless|if|possibly|probably|could|might|unlike|but|error|infinite)\b|n't\b",
    re.IGNORECASE,
)  # fmt: skip
_NUMBERS = re.compile(r"[-+]?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:\s*/\s*\d+)?%?")
_SENTENCE = re.compile(r"[A-Za-z'’,.!\-\s$;:]*")
_NO_SENTENCE = re.compile(
    r"\b(?:[b-hj-zB-HJ-Z]|or|step|line|part|problem|question|case|equation|method|square|squared|cube"
    r"|cubed|log|half|third|quarter|double|twice|percent|hundred|thousand|million|billion|trillion"
    r"|dozen|choose|power|negative|base|digit|digits|th|st|nd|rd|pi|point|and)\b|[\d)][A-Za-z]"
    r"|(?:^|\s)[-.,$]+\s",
    re.IGNORECASE,
)  # fmt: skip
_SAME = (
    frozenset(("undefined", "not defined", "does not exist", "doesnt exist", "dne")),
    frozenset(
        (
            "no solution",
            "no solutions",
            "no real solution",
            "no real solutions",
            "none",
            "empty set",
            "∅",
            "there is no solution",
            "there are no solutions",
        )
    ),
    frozenset(("infinity", "∞", "positive infinity", "infinite", "+∞", "inf")),
    frozenset(("all real numbers", "all reals", "r", "any real number", "every real number")),
)


def bare(text: str) -> str:
    """A text without the words that lead to its answer.

    >>> bare("So the final answer is: 42"), bare("= 17"), bare("at least 18")
    ('42', '17', 'at least 18')
    """
    return _LEAD.sub("", text).strip() or text


def doubtful(text: str) -> bool:
    """Whether words deny, bound or weaken what the text says.

    >>> doubtful("not 42"), doubtful("more than 18"), doubtful("42 eggs a day")
    (True, True, False)
    """
    return _DOUBT.search(TEXT_COMMANDS.sub(r" \1 ", text)) is not None


def only_number(text: str) -> str:
    """The one number of a sentence with the words behind it; empty where it is not that plain.

    >>> only_number("Janet makes $18 every day"), only_number("no, step 5"), only_number("5x")
    ('18 every day', '', '')
    """
    plain = TEXT_COMMANDS.sub(r" \1 ", text)
    found = _NUMBERS.findall(plain)
    if len(found) != 1 or doubtful(plain) or _NO_SENTENCE.search(plain):
        return ""
    before, _, after = plain.partition(found[0])
    if before and not before[-1].isspace() and before[-1] not in "$:":
        return ""
    if not (_SENTENCE.fullmatch(before) and _SENTENCE.fullmatch(after)):
        return ""
    return f"{found[0]}{after}".strip(" .!").replace("$", "")


def plain_text(text: str) -> str:
    r"""A text for comparing as words: without case, articles, punctuation and dress.

    >>> plain_text(r"\text{The East}."), plain_text("  Yes!")
    ('east', 'yes')
    """
    text = TEXT_COMMANDS.sub(r" \1 ", text)
    text = re.sub(r"\\mathbb\s*\{?\s*R\s*\}?", " R ", text)
    text = text.replace("\\infty", "∞").replace("\\emptyset", "∅").replace("\\varnothing", "∅")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[*`\"“”$]|~", " ", text)
    text = re.sub(r"[’']", "", text).casefold()
    text = re.sub(r"\b(?:the|a|an)\b(?=\s+\w)", " ", text)
    text = re.sub(r"\b([ap])\.\s?m\.?(?!\w)", r"\1m", text)
    text = re.sub(r"\s*([-+=<>/^,:;()\[\]{}])\s*", r"\1", text)
    text = " ".join(text.split()).rstrip(".;,")
    # behind words it is an exclamation, behind numbers a factorial
    return re.sub(r"(?<=[a-z]{2})!+$", "", text).strip()


def same_words(reference: str, answer: str) -> bool:
    """Whether two plain texts say one thing: equal, of one meaning, or one list of words."""
    if reference == answer:
        return True
    if any(reference in group and answer in group for group in _SAME):
        return True
    parts = [sorted(re.split(r",and |, and |,| and |;", text)) for text in (reference, answer)]
    if not len(parts[0]) == len(parts[1]) > 1:
        return False
    return parts[0] == parts[1] and all(re.fullmatch(r"[^\W\d]{2}[^\d]*", one) for one in parts[0])
