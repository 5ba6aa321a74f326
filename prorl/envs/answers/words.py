r"""The words and signs around and instead of mathematics: dress, lead-ins, doubts, plain texts.

Pure functions over short texts in which white space is single (`strip_markup`): so their patterns
are linear.
"""

from __future__ import annotations

import re
import unicodedata

from prorl.envs.answers.notation import TEXT_COMMANDS

_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore|then|finally|and so|i think|i(?= [a-z]{2})|we|you|he|she"
    r"|they|get|gets|has|have|find|obtain|conclude|that|the|my|our|final|correct|right|answer|ans"
    r"|result|value"
    r"|solutions?|total|us|is|are|be|equals?|would be|will be|must be|it|this|there|there are"
    r"|a total of|exactly|approximately|about|around|roughly|approx\.?|simply|just|only|given by"
    r"|equal to)(?=[ :,*=$\\(]|$)[ :,*]*"
    r"|(?:at |(?:at )?(?:the )?point )(?=\()"
    r"|(?:[:=≈]|\\approx|\\therefore|\\implies|\\Rightarrow|=>|->|→|∴) ?)+",
    re.IGNORECASE,
)  # fmt: skip
_DOUBT = re.compile(
    r"(?<!\\)\b(?:not|never|neither|nor|no|none|unknown|least|most|or more|or less|than|between"
    r"|(?:over|under|above|below)(?= [\d$\\])|except|almost|nearly|wrong|incorrect|false"
    r"|guess(?:ed)?|doubt"
    r"|maybe|perhaps|either|both|any|idea|cannot|can't|don't|doesn't|isn't|aren't|wasn't|unsure"
    r"|(?<= )minus|plus|times|divided|factorial|mod|modulo|root|square root|reciprocal"
    r"|inverse|instead|versus|vs|unless|if|possibly|probably|could|might|unlike|but|error|infinite)\b|n't\b",
    re.IGNORECASE,
)  # fmt: skip
_MEANINGS = (
    frozenset(("undefined", "not defined", "does not exist", "doesnt exist", "dne"))
    | {"limit does not exist", "limit doesnt exist"},
    frozenset(("infinitely many", "infinitely many solutions")),
)
_AGREED = re.compile(
    r"(yes|no)\b[,.;!]? (?:it|they|he|she|we|you|there|this|that|these|because|since)\b"
    r"(?!.*\b(?:but|or|maybe|perhaps|yes|no|if|unless)\b)",
    re.IGNORECASE,
)

_DELIMITERS = re.compile(r"\\[()\[\]]|__|`|(?<!\\)\$\$")
_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?![\w(])")
_SIGNS = {
    "$": "dollars", "€": "euros", "£": "GBP", "¥": "yen", "₹": "rupees", "¢": "cents",
    "USD": "dollars", "EUR": "euros", "GBP": "GBP", "Rs": "rupees", "JPY": "yen", "INR": "rupees",
}  # fmt: skip
_SIGN = r"\\?[$€£¥₹¢]|\b(?:USD|EUR|GBP|JPY|INR|Rs\.?)(?![a-zA-Z])"
_BEFORE = re.compile(rf"({_SIGN}) ?(?=[-+]?[\d.])")
_BEHIND = re.compile(r"(?<=\d) ?([€£¥₹¢]|(?<!\\)\$(?=$))")
_SCALED = (
    r"\d(?:[\d.,]*\d)?+(?: ?(?:\\text ?\{ ?)?(?:hundred|thousand|million|billion|trillion)\b"
    r" ?\}?)?"
)
_PRICE = re.compile(rf"(?:{_SIGN}) ?([-+]?{_SCALED}|[-+]?\.\d+)|(?<!\d)({_SCALED}) ?[€£¥₹¢$]")
_REPEATED = re.compile(r"([_*$~#,;:])\1{3,}")
_SCALE_WORD = re.compile(
    r"\\(?:text|mathrm|mbox) ?\{ ?(hundred|thousand|million|billion|trillion|dozen)\b ?([^{}]*)\}"
)
_TITLE = re.compile(r"^\\text(?:bf|rm|it)? ?\{([^{}\d]*(?::|\b(?:is|are))) ?\}")
_PRIMES = re.compile(r"(?<=[a-zA-Z])\^ ?(?:\{ ?(?:\\prime ?){1,3}\}|\\prime(?![a-zA-Z]))")
_CHOOSE = re.compile(
    r"\bC ?\( ?(\d{1,4}) ?, ?(\d{1,4}) ?\)|(?<![\w.^}])(\d{1,4}) ?C ?(\d{1,4})(?!\w)"
    r"|\{ ?(\d{1,4}) ?\\choose ?(\d{1,4}) ?\}"
)
_TWO_LETTERS = frozenset(
    re.findall(r"\w+", "no up on in to of it is at by or so we an as do go if")
)


def strip_markup(text: str) -> str:
    """Returns a text without delimiters, markdown and the full stop behind it, its spaces single.

    A currency's sign becomes its name behind the number.

    >>> strip_markup("**$1,234.50**."), strip_markup("€5 million"), strip_markup("$3 + $4")
    ('1,234.50 dollars', '5 million euros', '3 + 4')
    """
    text = " ".join("".join(map(_signed, text)).split())
    text = _REPEATED.sub(r"\1\1\1", text)
    text = _PRIMES.sub(lambda match: "'" * match[0].count("prime"), text.replace("⁻¹(", "^{-1}("))
    text = re.sub(r"\b(?:GCD|LCM)(?= ?\()", lambda match: match[0].lower(), text)
    text = _CHOOSE.sub(r"\\binom{\1\3\5}{\2\4\6}", text)
    text = _BOLD.sub(r"\1", _DELIMITERS.sub(" ", text).strip()).strip()
    text = re.sub(r"^\\text(?:bf)? ?\{((?:[Aa]nswer: ?)?\d[^{}]*)\}$", r"\1", text)
    text = _TITLE.sub(r"\1 ", text)
    text = _SCALE_WORD.sub(lambda match: f" {match[1]} {match[2]} ", text)
    text = _untrailed(" ".join(text.split()).replace("{:}", ":"))
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text).strip()
    text = re.sub(r'^["“]([^"“”]*)["”]$', r"\1", _priced(text).strip())
    text = re.sub(r"^\*\*|\*\*$", "", text)
    if text.startswith("*") and text.endswith("*"):
        text = text.strip("*_")
    return " ".join(_untrailed(text).split())


def _untrailed(text: str) -> str:
    """Removes the full stop behind it; the dots of `0.333...` stay."""
    text = text.replace("\\text{}", " ").rstrip(" ,;:。")
    return text if text.endswith("...") else text.rstrip(" .,;:。\\")


def _signed(char: str) -> str:
    """Writes `℃` as `°C` and `㎏` as `kg`; a tick is no sign."""
    if char in "✅✔✓":
        return ""
    return unicodedata.normalize("NFKC", char) if unicodedata.category(char) == "So" else char


def _priced(text: str) -> str:
    """A text whose numbers have their currency behind them; one with two currencies stays."""
    signs = [sign.strip("\\.") for sign in (*_BEFORE.findall(text), *_BEHIND.findall(text))]
    names = {_SIGNS[sign] for sign in signs}
    if len(names) != 1:
        return text
    name = names.pop()
    bare_text = _BEHIND.sub("", _BEFORE.sub("", text))
    if len(signs) > 1 or re.search(rf"\b{name.rstrip('s')}", bare_text, re.IGNORECASE):
        return bare_text
    return _PRICE.sub(lambda price: f"{price[1] or price[2]} {name}", text, count=1)


def strip_agreement_words(text: str) -> str:
    """Returns the `Yes` of `Yes, it is.`; any other text as it stands."""
    match = _AGREED.match(text)
    return match[1] if match else text


def plain_of(text: str) -> str:
    """A text without the commands that set it as text, and without braces around it."""
    for _ in range(2):
        text = re.sub(
            r"\\(?:text|mathrm|textbf|mathbf|textit|rm|bf|mbox) ?\{([^{}]*)\}", r"\1", text
        )
    return text.strip("{} ")


def bare(text: str) -> str:
    """A text without the words that lead to its answer.

    >>> bare("So the final answer is: 42"), bare("= 17"), bare("at least 18")
    ('42', '17', 'at least 18')
    """
    return _LEAD.sub("", text).strip() or text


def is_hedged(text: str) -> bool:
    """Returns whether words deny, bound or weaken what the text says.

    >>> is_hedged("not 42"), is_hedged("more than 18"), is_hedged("42 eggs a day")
    (True, True, False)
    """
    return _DOUBT.search(TEXT_COMMANDS.sub(r" \1 ", text)) is not None


def exact_text(text: str) -> str:
    r"""A text for comparing sign by sign: without dress, in one spacing; case and primes stay.

    >>> exact_text(r"f'( x )"), exact_text(r"\text{Co}"), exact_text(r"\left(1,\,2\right)")
    ("f'(x)", 'Co', '(1,2)')
    """
    text = TEXT_COMMANDS.sub(r" \1 ", text)
    text = re.sub(
        r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|`|\$(?=.)|(?<=\w)~", " ", text
    )
    if "\\{" in text:  # a set's condition
        text = re.sub(r"\\mid(?![a-zA-Z])|:", "|", text)
    text = re.sub(r" ?([-+=<>/^,:;()\[\]{}|]) ?", r"\1", " ".join(text.split()))
    return text.lstrip(" ;,").rstrip(" .;,")


def plain_text(text: str) -> str:
    r"""A text for comparing as words: without articles, punctuation and dress, in its case.

    >>> plain_text(r"\text{The East}."), plain_text("  Yes!")
    ('East', 'Yes')
    """
    text = TEXT_COMMANDS.sub(r" \1 ", text)
    text = re.sub(r"\\mathbb ?\{? ?R ?\}?", " ℝ ", text)
    text = text.replace("\\infty", "∞").replace("\\emptyset", "∅").replace("\\varnothing", "∅")
    text = re.sub(
        r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[`\"“”$]|(?<=\w)~", " ", text
    )
    text = re.sub(r"[’']", "", " ".join(text.split()))
    text = re.sub(r"\b(?:[Tt]he|an?|A(?=n? [a-z]{2})n?)\b(?= \w)", " ", text)
    text = re.sub(r"\b([apAP])\. ?[mM]\.?(?!\w)", r"\1m", " ".join(text.split()))
    text = re.sub(r" ?([-+=<>/^,:;()\[\]{}]) ?", r"\1", text)
    text = text.rstrip(".;, ")
    # behind words it is an exclamation, behind numbers a factorial
    return re.sub(r"(?<=[A-Za-z]{2})!{1,9}$", "", text).strip()


def same_case(first: str, second: str) -> bool:
    """Returns whether two texts differ in nothing but how people set their words' capitals.

    A word may begin with a capital, and one of three letters or more be all capitals; what mixes
    them otherwise, or is as short as a symbol (`Mg`, `CO`, `AaBb`, `m`), means its case.

    >>> pairs = ("east", "East"), ("TRUE", "true"), ("Co", "CO"), ("No", "NO"), ("H2O", "h2o")
    >>> [same_case(*pair) for pair in pairs]
    [True, True, False, False, True]
    """
    if first.casefold() != second.casefold():
        return False
    pairs = zip(re.findall(r"[^\W_]+", first), re.findall(r"[^\W_]+", second), strict=False)
    return all(left == right or (_is_word(left) and _is_word(right)) for left, right in pairs)


def _is_word(text: str) -> bool:
    if len(text) == 2:
        return text.lower() in _TWO_LETTERS and not text.isupper()
    return len(text) > 2 and (
        text.islower() or text.isupper() or (text.isalpha() and text[1:].islower())
    )


def same_words(reference: str, answer: str) -> bool:
    """Returns whether two plain texts are equal, of one meaning, or one list of words."""
    if same_case(reference, answer):
        return True
    reference, answer = reference.casefold(), answer.casefold()
    if any({reference, answer} <= meaning for meaning in _MEANINGS):
        return True
    parts = [sorted(re.split(r",and |, and |,| and |;", text)) for text in (reference, answer)]
    if not len(parts[0]) == len(parts[1]) > 1:
        return False
    return parts[0] == parts[1] and all(
        re.fullmatch(r"[^\W\d]{2}[^\d]*", word) for word in parts[0]
    )
