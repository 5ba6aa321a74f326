"""Text <-> token ids: a tokenizer of bytes, and any Hugging Face `tokenizer.json`.

The first has 256 bytes and nine specials, and needs no files.

Invariants: `encode` never yields the id of a special token, whatever the text spells, so that
content (a prompt, a tool's output) can neither end a message nor start a call. `decode` spells
specials out and turns invalid UTF-8 into U+FFFD. Ids are int32 arrays. It does not promise that
`decode(encode(text)) == text` for tokenizers that normalise text; for `ByteTokenizer` it does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from prorl.errors import ConfigError
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""The tokens that ChatML with Hermes tool calls needs; ids 256.. of `ByteTokenizer` in this
order.
"""

_NUM_BYTES = 256
_REMEMBERED_BYTES = 16 << 20
"""The limit of texts and their ids, then all are forgotten: siblings begin alike, and of a
conversation that is rendered again most was seen.
"""


class ByteTokenizer:
    """Each UTF-8 byte is an id, specials follow: no vocabulary, no files, nothing to download.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("<think>").tolist() == list(b"<think>")
    True
    >>> tokenizer.decode(np.array([72, 105, 263], dtype=np.int32))
    'Hi<think>'
    """

    def __init__(self) -> None:
        self.specials: Mapping[str, int] = {
            text: _NUM_BYTES + index for index, text in enumerate(SPECIALS)
        }
        self.vocab_size = _NUM_BYTES + len(SPECIALS)
        self.max_token_bytes = 1
        self._special_text = dict(zip(self.specials.values(), self.specials, strict=True))

    def encode(self, text: str) -> Int32:
        """Ids of the text's UTF-8 bytes; lone surrogates become `?`."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Int32) -> str:
        """Text of ids; an id outside the vocabulary becomes U+FFFD."""
        parts: list[str] = []
        start = 0
        for position in np.flatnonzero((ids < 0) | (ids >= _NUM_BYTES)).tolist():
            parts.append(_decode_bytes(ids[start:position]))
            parts.append(self._special_text.get(int(ids[position]), "\N{REPLACEMENT CHARACTER}"))
            start = position + 1
        parts.append(_decode_bytes(ids[start:]))
        return "".join(parts)


def _decode_bytes(ids: Int32) -> str:
    return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")


_PLAIN: dict[str, Json] = {
    "added_tokens": [],
    "post_processor": None,
    "truncation": None,
    "padding": None,
}
"""Settings of a tokenizer that encodes text and nothing else: no special token is found in it."""


def _library(path: str | Path) -> Any:
    """The package tokenizers. Raises ConfigError where it is not installed."""
    try:
        import tokenizers
    except ImportError as cause:
        raise ConfigError(
            f"tokenizer {str(path)!r} is a Hugging Face directory",
            "the package tokenizers",
            "install prorl's extra `render`",
        ) from cause
    return tokenizers


class HFTokenizer:
    """A Hugging Face `tokenizer.json`, read with the `tokenizers` package (extra `render`).

    `compact_tools` (`"prorl_compact_tools": true` in tokenizer_config.json) asks the renderer for
    one line of tools, for toy models. Two copies are held: the file as it is decodes; one without
    its added tokens encodes, so that text is only ever text. `wide_specials`: added tokens that
    swallow the blanks (before, behind) them.
    """

    def __init__(self, path: str | Path) -> None:
        tokenizers, where = _library(path), Path(path)
        data = _read_tokenizer_json(where)
        added = data.get("added_tokens", ())
        self.specials: Mapping[str, int] = {token["content"]: token["id"] for token in added}
        self.wide_specials: Mapping[str, tuple[bool, bool]] = {
            token["content"]: (bool(token.get("lstrip")), bool(token.get("rstrip")))
            for token in added
            if token.get("lstrip") or token.get("rstrip")
        }
        self._special_ids = np.array(sorted(self.specials.values()), dtype=np.int32)
        self._special_text = re.compile(
            "|".join(re.escape(text) for text in self.specials) or r"(?!)"
        )
        self._decoder = tokenizers.Tokenizer.from_str(orjson.dumps(data).decode())
        self._check_ids(where)
        self._encoder = tokenizers.Tokenizer.from_str(orjson.dumps(data | _PLAIN).decode())
        vocabulary = self._decoder.get_vocab(with_added_tokens=True)
        self.num_ids = 1 + max(vocabulary.values())
        self.max_token_bytes = _max_token_bytes(vocabulary, data["model"])
        self.vocab_size = max(_model_size(where), self.num_ids)
        self._remembered: dict[str, Int32] = {}
        self._remembered_bytes = 0
        settings = where / "tokenizer_config.json"
        self.compact_tools = _setting(settings, "prorl_compact_tools") is True

    def _check_ids(self, path: Path) -> None:
        for text, stated in self.specials.items():
            token_id = self._decoder.token_to_id(text)
            if token_id != stated:
                raise ConfigError(
                    f"{path}/tokenizer.json says that {text!r} is {stated}, `tokenizers` reads"
                    f" {token_id}",
                    "added tokens that stand in the vocabulary under their own ids",
                    "export it with save_pretrained()",
                )

    def encode(self, text: str) -> Int32:
        """Ids of plain text, without any begin or end token; read-only."""
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._plain(text)
            ids.flags.writeable = False
            if self._remembered_bytes > _REMEMBERED_BYTES:
                self._remembered.clear()
                self._remembered_bytes = 0
            self._remembered[text] = ids
            self._remembered_bytes += ids.nbytes + 2 * len(text)
        return ids

    def _plain(self, text: str) -> Int32:
        ids = self._encode(text)
        if not np.isin(ids, self._special_ids).any():
            return ids
        # Some vocabularies hold their specials as ordinary pieces too: cut each one in two, so that
        # no piece spells it.
        cuts = [0, *(match.start() + 1 for match in self._special_text.finditer(text)), len(text)]
        ids = np.concatenate([self._encode(text[start:end]) for start, end in pairwise(cuts)])
        # What is left comes from a normaliser that rewrites look-alikes into a special: losing it
        # is better than obeying it.
        return ids[~np.isin(ids, self._special_ids)]

    def encode_whole(self, text: str) -> Int32:
        """Ids of text in which added tokens are recognised, as the file has it. Only to compare
        with.
        """
        return np.array(self._decoder.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Int32) -> str:
        """Text of ids, specials spelled out; ids outside the vocabulary vanish."""
        return str(self._decoder.decode(ids.tolist(), skip_special_tokens=False))

    def _encode(self, text: str) -> Int32:
        clean = text.encode("utf-8", "replace").decode()
        return np.array(self._encoder.encode(clean, add_special_tokens=False).ids, dtype=np.int32)


UNBOUNDED_TOKEN_BYTES = 1024
"""The bytes of text that one id may stand for where a vocabulary sets no bound: a run of letters
that it does not know is one `unk`; a tokenizer of somebody else's may hold anything.
"""


def max_token_bytes(renderer: Any) -> int:
    """The most bytes of text that one id of a renderer's tokenizer stands for."""
    tokenizer = getattr(renderer, "tokenizer", renderer)
    return int(getattr(tokenizer, "max_token_bytes", UNBOUNDED_TOKEN_BYTES))


def _max_token_bytes(vocabulary: Mapping[str, int], model: Mapping[str, Any]) -> int:
    """The most bytes of UTF-8 that one id stands for.

    A token is written with at least as many bytes in the file: each byte is a letter there, or
    blanks are a letter of three bytes.
    """
    longest = max(len(token.encode("utf-8", "replace")) for token in vocabulary)
    is_bounded = model.get("type") == "BPE" and model.get("unk_token") is None
    return longest if is_bounded or model.get("byte_fallback") else UNBOUNDED_TOKEN_BYTES


def _read_tokenizer_json(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as cause:
        raise ConfigError(
            f"cannot read {path}: {cause}",
            "a Hugging Face directory with tokenizer.json",
            "name its directory, or use `bytes`",
        ) from cause
    if not isinstance(data, dict) or "model" not in data:
        raise ConfigError(
            f"{path} has no `model`",
            "a Hugging Face tokenizer.json",
            "export it with save_pretrained()",
        )
    return data


def _model_size(directory: Path) -> int:
    """Rows of the model's embedding; 0 when not stated. It may be padded beyond the tokenizer's own
    ids.
    """
    size = _setting(directory / "config.json", "vocab_size")
    return size if isinstance(size, int) else 0


def _setting(path: Path, key: str) -> Json:
    """A value of a JSON file that a checkpoint may lack; None when it does."""
    try:
        settings = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return settings.get(key) if isinstance(settings, dict) else None


def load_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, or a directory with tokenizer.json. Raises ConfigError."""
    if spec == "bytes":
        return ByteTokenizer()
    if not Path(spec).is_dir():
        hint = (
            "did you mean `bytes`?"
            if difflib.get_close_matches(spec, ["bytes", "byte"])
            else "name an existing directory"
        )
        raise ConfigError(
            f"unknown tokenizer {spec!r}", "`bytes` or a Hugging Face directory", hint
        )
    return HFTokenizer(spec)
