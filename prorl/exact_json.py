"""JSON that others write, read and written without loss.

orjson reads integers from 2^64 on as floats and refuses to write them; `json` is exact and about
five times slower. So orjson does what it can do exactly, and `json` the rest.

>>> loads('{"n": 123456789012345678901234567890}')
{'n': 123456789012345678901234567890}
>>> dumps({"n": 2**70})
b'{"n":1180591620717411303424}'
>>> loads_as_written('{"answer": 0.50}')
{'answer': '0.50'}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import orjson

_LONG = b"0" * 19
"""2^63 has 19 digits: only text with so many in a row can hold an integer that orjson rounds."""
_DIGITS_AS_ZEROS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
"""A table of bytes.translate, which is ten times as fast as a regular expression here."""


def loads(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text, integers exact. Raises orjson.JSONDecodeError, a ValueError."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if _LONG not in data.translate(_DIGITS_AS_ZEROS):
        return orjson.loads(text)
    try:
        orjson.loads(text)  # refuses what `json` takes: NaN, half a surrogate pair
    except orjson.JSONDecodeError as cause:
        if "infinity" not in str(cause):  # what orjson says of an integer of 309 digits
            raise
    return _slowly(text)


def loads_as_written(text: str | bytes | bytearray) -> Any:
    """The same, and numbers with a point or an exponent as the text that was written."""
    return _slowly(text, parse_float=str)


def _slowly(text: str | bytes | bytearray, parse_float: Callable[[str], Any] | None = None) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse, parse_float=parse_float)
    except orjson.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as cause:
        document = text if isinstance(text, str) else bytes(text).decode("utf-8", "replace")
        raise orjson.JSONDecodeError(str(cause), document, 0) from None


def dumps(value: Any, option: int = 0, default: Callable[[Any], Any] | None = None) -> bytes:
    """JSON as orjson writes it, integers of any size too. Raises TypeError.

    Of orjson's options `OPT_SORT_KEYS` and `OPT_SERIALIZE_NUMPY` hold beside such integers.
    """

    def plain(other: Any) -> Any:
        if option & orjson.OPT_SERIALIZE_NUMPY and hasattr(other, "tolist"):
            return other.tolist()
        if default is None:
            raise TypeError(f"Type is not JSON serializable: {type(other).__name__}")
        return default(other)

    try:
        return orjson.dumps(value, option=option, default=default)
    except TypeError as cause:
        if "64-bit" not in str(cause):
            raise
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
            sort_keys=bool(option & orjson.OPT_SORT_KEYS),
            default=plain,
        )
        return text.encode()
    except (ValueError, RecursionError) as cause:
        raise TypeError(str(cause)) from None
