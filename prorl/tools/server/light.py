"""json, signal and socket without their Python halves: the C modules that those stand on.

The halves left out build enums and compile patterns at import. That costs more than everything else
in the server's start, and every sandbox that runs the server as a program pays it. What is
different: numbers instead of enums, and `accept` is a function.
"""

from __future__ import annotations

import _socket as socket
from _json import encode_basestring_ascii

TYPE_CHECKING = False  # as in `typing`, whose import is just as dear
if TYPE_CHECKING:
    import signal
    from typing import Any

    make_scanner: Any
    make_encoder: Any
else:
    import _signal as signal
    from _json import make_encoder, make_scanner

__all__ = ["TYPE_CHECKING", "accept", "dumps", "loads", "signal", "socket"]


class _Rules:
    """The answers that the C scanner asks its caller for: those that `json.loads` gives by
    default.
    """

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


_scan = make_scanner(_Rules)
_encode = make_encoder(None, None, encode_basestring_ascii, None, ":", ",", False, False, True)


def loads(text: str) -> Any:
    """The value of a JSON text without spaces around it. Raises ValueError.

    >>> loads('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        value, end = _scan(text, 0)
    # the last where C looks in vain for json's own error class
    except (StopIteration, ValueError, SystemError):
        end = -1
    if end != len(text):
        raise ValueError(f"not one JSON value: {text[:80]!r}")
    return value


def dumps(value: Any) -> str:
    """JSON text of dicts, lists, strings and numbers. Raises TypeError.

    >>> dumps({"a": [1, True]})
    '{"a":[1,true]}'
    """
    return "".join(_encode(value, 0))


def accept(listener: socket.socket) -> socket.socket:
    """The next connection. Raises OSError."""
    fd, _address = listener._accept()  # type: ignore[attr-defined]
    return socket.socket(fileno=fd)
