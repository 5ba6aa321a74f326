"""What answers are dressed in: delimiters, markdown, currency signs, commands of text."""

from __future__ import annotations

import re
import unicodedata

_DELIMITERS = re.compile(r"\\[()\[\]]|__|`|(?<!\\)\$\$")
_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?![\w(])")
_CURRENCY = re.compile(r"(?:\\\$|[$€£¥₹]|\b(?:USD|EUR|GBP|Rs\.?)(?![a-zA-Z]))\s*(?=[-\d.])")
_TRAILING = re.compile(r"(?:(?<!\.\.)(?<!\.)[.,;:]|\\\\|\s)+$")


def undress(text: str) -> str:
    """A text without delimiters, markdown, currency signs, and the full stop behind it."""
    text = "".join(char for char in text if char in "°␤" or unicodedata.category(char) != "So")
    text = _BOLD.sub(r"\1", _DELIMITERS.sub(" ", text).strip()).strip()
    text = _TRAILING.sub("", text.replace("{:}", ":"))
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text).strip()
    if _CURRENCY.search(text):
        has_words = bool(re.search(r"[A-Za-z]{2}", _CURRENCY.sub("", text)))
        sign = "cents" if "¢" in text else "dollars" if "$" in text else ""
        text = _CURRENCY.sub("", text) + (f" {sign}" if sign and not has_words else "")
    text = text.replace("\\text{dollars}", "dollars").strip().strip('"“”')
    if text.startswith("*") or text.endswith("*"):
        text = text.strip("*_")
    return _TRAILING.sub("", text).strip()


def plain_of(text: str) -> str:
    """A text without the commands that set it as text, and without braces around it."""
    return re.sub(
        r"\\(?:text|mathrm|textbf|mathbf|textit|rm|bf)\s*\{([^{}]*)\}",
        r"\1",
        re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text),
    ).strip("{} ")
