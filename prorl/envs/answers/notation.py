r"""Spelling: LaTeX, Unicode and markdown -> one plain notation, and that notation -> tokens.

Pure functions, linear in their text. What is spelled in many ways has one sign afterwards:
`\dfrac`, `\tfrac` are `\frac`; `\leq`, `<=` are `≤`; words of `\text{}` stand in `⟦ ⟧`; `\{ \}` are
`⦃ ⦄`. Numbers lose the separators of their thousands, in every notation that cannot be read
otherwise.

>>> [token.text for token in tokens(spell(r"2\,\dfrac12 \text{ km}"))]
['2', '\\frac', '12', 'km']
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

MAX_TOKENS = 400
MAX_SERIES = 40
ROW_END = "␤"
"""The sign for `\\\\\\\\`, the end of a matrix' row."""


class UnreadableError(ValueError):
    """A text that this reader has no reading for; its message says why."""


class Token(NamedTuple):
    """One sign of the plain notation."""

    kind: str
    """num, name (letters), word (of `\\text`), command (`\\frac`) or sign."""
    text: str
    spaced: bool
    """True if a space stands before it."""


FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc arcsin arccos arctan arccot arcsinh arccosh arctanh asin acos atan"
        " sinh cosh tanh coth ln log lg exp sqrt cbrt abs gcd lcm max min floor ceil factorial",
    )
)
GREEK = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu"
        " xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi"
        " Psi Omega ell hbar",
    )
)

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*",
    "∙": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "π": "\\pi ", "∞": "\\infty ",
    "√": "\\sqrt ", "∛": "\\sqrt[3] ", "∜": "\\sqrt[4] ",
    "⩽": "≤", "⩾": "≥", "≦": "≤", "≧": "≥", "º": "°", "˚": "°",
    "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "ℝ": "\\R ", "ℤ": "\\Z ", "ℕ": "\\N ",
    "ø": "∅", "⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "﹪": "%", "％": "%", "，": ",", "：": ":",
    "（": "(", "）": ")", "；": ";", "。": ".", "＝": "=", "＋": "+", "∶": ":", "ⅈ": "i",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ", "\u2003": " ", "\u3000": " ",
    "\u200b": "", "\u2060": "", "\ufeff": "", "\u200a": " ", "\u2007": " ", "\u2008": " ",
    "\t": " ", "\n": " ", "\r": " ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "γ": "\\gamma ", "λ": "\\lambda ", "μ": "\\mu ", "µ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ",
    "σ": "\\sigma ", "δ": "\\delta ", "ε": "\\epsilon ", "ρ": "\\rho ", "Ω": "\\Omega ",
    "₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3", "₄": "_4", "₅": "_5", "₆": "_6", "₇": "_7",
    "₈": "_8", "₉": "_9",
}  # fmt: skip
_TABLE = str.maketrans(_SIGNS)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ"
_SUPERSCRIPT_RUN = re.compile(f"[{_SUPERSCRIPTS}]+")
_FROM_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS, "0123456789-+n")
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")

TEXT_COMMANDS = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|texttt|mbox|hbox|emph|mathrm|rm|mathbf|bf|mathit|mathsf"
    r"|operatorname\*?|boldsymbol|unit|pmb|bm)\s*\{([^{}]*)\}"
)
"""A command whose braces hold words."""
_WRAPPERS = re.compile(
    r"\\(?:boxed|fbox|framebox|displaystyle|textstyle|ensuremath|mathbf|mathrm|boldsymbol|bm"
    r"|large|Large)\b\s*"
)
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\s*\.?"
    r"|\\(?:limits|nolimits|displaystyle|textstyle|rm|bf|it)(?![a-zA-Z])\s*"
)
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"\\(?:!|allowbreak)", ""),
        (
            r"\\[,;:> ]|(?<=[\w})])~"
            r"|\\(?:quad|qquad|thinspace|enspace|hspace\{[^{}]*\})(?![a-zA-Z])",
            " ",
        ),
        (r"\\(?:[dtcs]|nice)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\textcolor *\{[^{}]*\}|\\color *\{[^{}]*\}", ""),
        (r"(?<=\d) ?([kMm]?) ?\\Omega(?= *$)", r" ⟦\1ohm⟧ "),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=|=<", "≤"),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=", "≥"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=|\\not\s*=", "≠"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])", "≈"),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\pm(?![a-zA-Z])|\+/-|\+-", "±"),
        (r"\\mp(?![a-zA-Z])", "∓"),
        (r"\\cup(?![a-zA-Z])", "∪"),
        (r"\\cap(?![a-zA-Z])", "∩"),
        (r"\\(?:setminus|backslash|smallsetminus)(?![a-zA-Z])", "∖"),
        (r"\\notin(?![a-zA-Z])", "∉"),
        (r"\\in(?![a-zA-Z])", "∈"),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])", "∅"),
        (r"\\mathbb\s*+\{?\s*+([RZNQC])\s*\}?", r"\\\1 "),
        (r"\\R *\^ *(?:\{ *\+ *\}|\+)", r"(0,\\infty)"),
        (r"\\(?:l|r)?vert(?![a-zA-Z])|\\\||\\mid(?![a-zA-Z])", "|"),
        (r"\\lfloor(?![a-zA-Z])", "⌊"),
        (r"\\rfloor(?![a-zA-Z])", "⌋"),
        (r"\\lceil(?![a-zA-Z])", "⌈"),
        (r"\\rceil(?![a-zA-Z])", "⌉"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\lbrace(?![a-zA-Z])|\\\{", "⦃"),
        (r"\\rbrace(?![a-zA-Z])|\\\}", "⦄"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (
            r"(?:\^\s*+|(?<![\s^])\s*+)"
            r"(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])|\\degrees?(?![a-zA-Z]))",
            "°",
        ),
        (r"\\(?:cdots|ldots|dots)(?![a-zA-Z])", "..."),
        (r"\\(?:colon)(?![a-zA-Z])", ":"),
        (r"\\%", "%"),
        (r"\\(?:#|&|_)", " "),
        (r"\*\*\s*(?=[-\w(])", "^"),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", "∪"),
    )
)  # fmt: skip
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)"
    r"(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d)(?!\d))|\((\d+)\))"
)
_ELLIPSIS = re.compile(r"(?<![\d.])(\d*)\.(\d{0,60}?)(\d{1,6}?)\3{2,}+\.\.\.+")
_SERIES = re.compile(r"(-?\d{1,6}), ?(-?\d{1,6}),((?: ?-?\d{1,6},){0,9}) ?\.\.\., ?(-?\d{1,6})")
_GROUPED = (
    re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)"),
    re.compile(r"(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"),
    re.compile(r"(?<![\d.,_ ])\d{1,3}(?:[ '’_]\d{3})+(?![ '’_]?\d)"),
    re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![.\d])"),
)
_EUROPEAN = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d+(?![.,\d])")
_DECIMAL_COMMA = re.compile(r"([-+]?(?:0(?=,)|\d+(?!,\d{3}(?!\d)))),(\d+)(?=[^\d.,;()\[\]{}]*$)")
_TOKEN = re.compile(
    r"(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)"
    r"|(?P<word>⟦[^⟦⟧]*⟧)"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<name>[a-zA-Z]+)"
    r"|(?P<sign>[^\s\w]|_)"
)


def spell(text: str) -> str:
    """Returns a text in the plain notation. Raises UnreadableError for control characters."""
    if any(unicodedata.category(char) == "Cc" and char not in "\t\n\r" for char in text):
        raise UnreadableError("a control character")
    # a row's end in a matrix, a backslash written twice elsewhere
    text = text.replace("\\\\", ROW_END if "\\begin" in text else "\\")
    text = _SUPERSCRIPT_RUN.sub(lambda match: f"^{{{match[0].translate(_FROM_SUPERSCRIPT)}}}", text)
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]), text)
    text = text.translate(_TABLE)
    text = text.replace("{,}", ",").replace("{.}", ".").replace("{:}", ":")
    for pattern, ours in _SPELLINGS[:2]:
        text = pattern.sub(ours, text)
    text = _SIZES.sub("", text)
    for _ in range(3):
        text = TEXT_COMMANDS.sub(_as_words, text)
    text = _WRAPPERS.sub("", text)
    for pattern, ours in _SPELLINGS[2:]:
        text = pattern.sub(ours, text)
    text = _SERIES.sub(_as_items, _repeating(text))
    return re.sub(r"\s+", " ", text).strip()


def _as_words(match: re.Match[str]) -> str:
    """Returns the words of a `\\text`; mathematics' letters and numbers stand for themselves."""
    inner = match[1].strip()
    if re.fullmatch(r"[ie]|[-\d.,/ ]+", inner) or inner in FUNCTIONS:
        return f" {inner} " if inner in FUNCTIONS else inner
    if inner in ("or", "and", "", ",") or inner.startswith(("\\frac", "\\dfrac", "\\sqrt")):
        return f" {inner} "
    return f" ⟦{inner.replace('⟦', ' ').replace('⟧', ' ')}⟧ "


def _as_items(match: re.Match[str]) -> str:
    """Returns the numbers that `1, 2, ..., 5` stands for, where they are few."""
    first, second, last = (int(match[index]) for index in (1, 2, 4))
    step = second - first
    if not step or (last - first) % step or not 1 < (last - first) // step <= MAX_SERIES:
        return match[0]
    items = [str(item) for item in range(first, last + (1 if step > 0 else -1), step)]
    written = [item.strip() for item in match[3].split(",")[:-1]]
    return ",".join(items) if items[2 : 2 + len(written)] == written else match[0]


def _repeating(text: str) -> str:
    """Returns repeating decimals as fractions: `0.1\\overline{6}`, `0.(3)`, `0.333...`."""

    def fraction(whole: str, head: str, tail: str) -> str:
        scale, cycle = 10 ** len(head), 10 ** len(tail) - 1
        numerator = int((whole + head) or "0") * cycle + int(tail)
        return f" ({numerator}/{scale * cycle}) "

    text = _REPEATING.sub(
        lambda match: fraction(match[1], match[2], match[3] or match[4] or match[5]), text
    )
    return _ELLIPSIS.sub(lambda match: fraction(match[1], match[2], match[3]), text)


def join_thousands(text: str) -> str:
    """Removes the separators of thousands from numbers that can be read no other way.

    >>> [join_thousands(text) for text in ("1,234", "12 345", "1'000'000", "(1,234)")]
    ['1234', '12345', '1000000', '(1,234)']
    """
    text = _EUROPEAN.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    inside = bool(re.search(r"[(\[⦃{][^(\[⦃{)\]⦄}]*,", text)) and not re.search(r",\s", text)
    for index, pattern in enumerate(_GROUPED):
        if not (inside and index < 2):
            text = pattern.sub(lambda match: re.sub(r"[^\d]", "", match[0]), text)
    return text


def decimal_commas(text: str) -> str:
    """Returns a number with a point for its decimal comma: `3,14` as `3.14`.

    >>> [decimal_commas(text) for text in ("3,14 m", "0,125", "5,000", "(1,2)", "1,2,3")]
    ['3.14 m', '0.125', '5,000', '(1,2)', '1,2,3']
    """
    match = _DECIMAL_COMMA.match(text)
    if match is None or join_thousands(text) != text:
        return text
    return f"{match[1]}.{match[2]}{text[match.end() :]}"


def tokens(text: str) -> list[Token]:
    """Returns the signs of a spelled text. Raises UnreadableError."""
    signs: list[Token] = []
    place, spaced = 0, False
    while place < len(text):
        if text[place].isspace():
            place, spaced = place + 1, True
            continue
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None or len(signs) >= MAX_TOKENS:
            raise UnreadableError(f"{text[place : place + 10]!r}, or too much")
        kind, sign = match.lastgroup, match[0]
        signs.append(Token(kind, sign.strip("⟦⟧").strip() if kind == "word" else sign, spaced))
        place, spaced = match.end(), False
    return signs
