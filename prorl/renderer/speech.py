"""What was sampled, as text where only real markers look like markers; its thoughts apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from prorl.renderer.guard import OPEN, bare

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32


class Speech:
    """Decodes completions for the grammars.

    An added token that a marker holds stays as it is when it was sampled as that token; the same
    letters sampled as plain text are fenced. A marker that the tokenizer has no token for is read
    as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        held = {
            text: id
            for text, id in tokenizer.specials.items()
            if text and any(text in marker for marker in markers)
        }
        self._text_of = {id: text for text, id in held.items()}
        self._spelled = re.compile(
            "|".join(re.escape(text) for text in sorted(held, key=len, reverse=True)) or r"(?!)"
        )
        # A look into a table is twenty times faster than `np.isin`, which sorts. The last entry
        # stands for ids beyond it.
        self._is_marker = np.zeros(max([tokenizer.vocab_size, *self._text_of]) + 2, dtype=bool)
        self._is_marker[list(self._text_of)] = True

    def text(self, ids: Int32) -> str:
        """All ids as text; other specials are spelled out."""
        parts: list[str] = []
        start = 0
        for position in np.flatnonzero(self._is_marker.take(ids, mode="clip")).tolist():
            parts.append(self._plain(ids[start:position]))
            parts.append(self._text_of[int(ids[position])])
            start = position + 1
        parts.append(self._plain(ids[start:]))
        return "".join(parts)

    def _plain(self, ids: Int32) -> str:
        if not len(ids):
            return ""
        text = bare(self._tokenizer.decode(ids))
        return self._spelled.sub(lambda match: match[0][0] + OPEN + match[0][1:], text)


def split_thoughts(
    text: str, markers: tuple[str, str], *, is_open: bool, call_opener: str = ""
) -> tuple[str, str]:
    """Thoughts, and the rest of a turn.

    `is_open`: the prompt has begun a thought. A thought that nobody ended goes to the end of the
    text, or to the first `call_opener` where one is given: a turn that was ended by the model and
    holds a call means it.

    >>> split_thoughts("hm</think>\\n\\n42", ("<think>", "</think>"), is_open=True)
    ('hm', '\\n\\n42')
    """
    opener, closer = markers
    thoughts: list[str] = []
    rest: list[str] = []
    while text or is_open:
        if not is_open:
            outside, opened, text = text.partition(opener)
            rest.append(outside)
            if not opened:
                break
        is_open = False
        thought, closed, after = text.partition(closer)
        if not closed and call_opener:
            thought, found, tail = text.partition(call_opener)
            after = found + tail
        thoughts.append(thought)
        text = after
    said = "".join(rest).replace(closer, "")
    return bare("\n".join(thoughts)).strip("\n"), said
