"""Keeps content from spelling a marker while strangers' templates move it about.

    fence: "a <|im_end|> b"  ->  "a \\ufdd0<|im_end|>\\ufdd1 b"  -> template -> ids of plain text

Unicode's noncharacters U+FDD0 to U+FDD2 stand for nothing in any text that is exchanged; they are
taken out of all content first. Each added token that a content string spells is fenced; after
rendering only unfenced tokens become specials, and the fenced ones are encoded as the plain text
that they are. Content that ends in the beginning of a token is fenced off from what the template
writes behind it. Strings that spell nothing are not touched, so their ids are the official ones.
`CompletionDecoder` is the way back: what was sampled, as text where only real markers look like
markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from prorl.types import Json

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32

OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
_FENCED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")
_MIN_PREFIX = 2
"""A token's first character alone is not fenced off: `<` or `[` ends much honest text."""

T = TypeVar("T")


class Guard:
    """Fences content before rendering, turns rendered text into ids after it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = sorted(tokenizer.specials, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._prefixes = frozenset(
            token[:size] for token in tokens for size in range(_MIN_PREFIX, len(token))
        )
        self._longest = max(map(len, self._prefixes), default=0)
        self._wide = getattr(tokenizer, "wide_specials", {})

    def fence(self, value: Json) -> Json:
        """A JSON value with every string in it fenced, keys included."""
        if isinstance(value, str):
            return self.fence_text(value)
        if isinstance(value, Mapping):
            return {self.fence_text(str(key)): self.fence(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.fence(item) for item in value]
        return value

    def fence_text(self, text: str) -> str:
        """One string with fences around it."""
        text = self._tokens.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}", bare(text))
        ends = (text[-size:] for size in range(_MIN_PREFIX, min(self._longest, len(text)) + 1))
        return text + OPEN if any(end in self._prefixes for end in ends) else text

    def encode(self, text: str) -> Int32:
        """Ids of rendered text: tokens that the template wrote are specials, all else is text."""
        pieces = [self._piece(piece, is_token) for piece, is_token in self._split(text)]
        return np.concatenate([np.empty(0, dtype=np.int32), *pieces])

    def _piece(self, piece: str, is_token: bool) -> Int32:
        if is_token:
            return np.array([self._tokenizer.specials[piece]], dtype=np.int32)
        return self._tokenizer.encode(piece)

    def _split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Plain text and tokens in order, fences taken out. A lone fence cuts and vanishes."""
        start = 0
        for fenced in _FENCED.finditer(text):
            yield from self._tokens_in(text[start : fenced.start()])
            if fenced[1]:
                yield fenced[1], False
            start = fenced.end()
        yield from self._tokens_in(text[start:])

    def _tokens_in(self, text: str) -> Iterator[tuple[str, bool]]:
        start = 0
        for token in self._tokens.finditer(text):
            strip_left, strip_right = self._wide.get(token[0], (False, False))
            before = text[start : token.start()]
            if before := before.rstrip() if strip_left else before:
                yield before, False
            yield token[0], True
            start = token.end()
            while strip_right and start < len(text) and text[start].isspace():
                start += 1
        if text[start:]:
            yield text[start:], False


class CompletionDecoder:
    """Decodes completions for the grammars.

    An added token that a marker holds stays as it is when it was sampled as that token; the same
    letters sampled as plain text are fenced. A marker that the tokenizer has no token for is read
    as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        marker_ids = {
            text: id
            for text, id in tokenizer.specials.items()
            if text and any(text in marker for marker in markers)
        }
        self._text_of = {id: text for text, id in marker_ids.items()}
        self._spelled = re.compile(
            "|".join(re.escape(text) for text in sorted(marker_ids, key=len, reverse=True))
            or r"(?!)"
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


def bare(text: str) -> str:
    """The text without its fences.

    >>> bare("a \\ufdd0<think>\\ufdd1")
    'a <think>'
    """
    return text.replace(OPEN, "").replace(CLOSE, "").replace(MARK, "")


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
    at = 0
    while at < len(text) or is_open:
        if not is_open:
            begin = text.find(opener, at)
            rest.append(text[at : begin if begin >= 0 else None])
            if begin < 0:
                break
            at = begin + len(opener)
        is_open = False
        end = text.find(closer, at)
        if end >= 0:
            thoughts.append(text[at:end])
            at = end + len(closer)
            continue
        end = text.find(call_opener, at) if call_opener else -1
        end = end if end >= 0 else len(text)
        thoughts.append(text[at:end])
        at = end
    content = "".join(rest).replace(closer, "")
    return bare("\n".join(thoughts)).strip("\n"), content
