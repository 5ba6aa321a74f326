"""Tokens of a rollout for people: the recorded ids spelled out one by one, with what is known of
each.

Ids are never rendered or encoded again. A character that several ids make stands at the first of
them. Where the run's tokenizer is not on this host, or is another one by now, there is no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from prorl.errors import ConfigError
from prorl.tokenizer import load_tokenizer
from prorl.types import Json
from prorl.view.opened import Opened

if TYPE_CHECKING:
    from prorl.protocols import Tokenizer
    from prorl.types import Int32

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 8
"""Ids that one character can take: four bytes, and their neighbours."""


class Pieces:
    def __init__(self, spec: str) -> None:
        self.trouble = ""
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[int, str] = {}
        try:
            self._tokenizer = load_tokenizer(spec) if spec else None
            self.trouble = "" if spec else "the manifest names no tokenizer"
        except ConfigError as error:
            self.trouble = str(error)
        if self._tokenizer is not None:
            # Some tokenizers drop the blank before a first word: each id is read behind another.
            self._anchor = self._tokenizer.encode("a")[:1]
            self._before = self._tokenizer.decode(self._anchor)

    def spell(self, ids_L: Int32) -> tuple[list[str], list[int]]:
        """Returns texts, and which of them each id is.

        >>> Pieces("bytes").spell(np.array([104, 105, 104], np.int32))
        (['h', 'i'], [0, 1, 0])
        >>> Pieces("bytes").spell(np.array([0xC3, 0xA9], np.int32))[0][2:]
        ['é', '']
        """
        different, where = np.unique(ids_L, return_inverse=True)
        texts = [self._text_of(token_id) for token_id in different.tolist()]
        broken = np.array([text[-1:] == _BROKEN for text in texts], bool)[where]
        at: list[int] = where.tolist()
        done = 0
        for place in np.flatnonzero(broken).tolist() if self._tokenizer is not None else ():
            if place >= done:
                here = self._several(ids_L[place : place + _LONGEST])
                done = place + len(here)
                at[place:done] = range(len(texts), len(texts) + len(here))
                texts += here
        return texts, at

    def _text_of(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"‹{token_id}›"
        text = self._texts.get(token_id)
        if text is None:
            both = np.append(self._anchor, np.int32(token_id)).astype(np.int32)
            text = self._texts[token_id] = self._tokenizer.decode(both)[len(self._before) :]
        return text

    def _several(self, ids: Int32) -> list[str]:
        assert self._tokenizer is not None
        for count in range(2, len(ids) + 1):
            text = self._tokenizer.decode(ids[:count])
            if _BROKEN not in text:
                return [text, *[""] * (count - 1)]
        return [_BROKEN]


def tokens(opened: Opened, pieces: Pieces, rollout_id: int) -> dict[str, Json]:
    """Returns each sequence of a rollout: texts, logprobs, spans, and the learner's values."""
    tables, damaged = opened.tables(rollout_id, ("sequences",))
    trained = opened.answer(
        "select sequence_id, step, advantage, loss, learner_logprobs from trained where"
        f" rollout_id = {rollout_id} order by step",
        rows=64,
    )
    by_sequence = {row["sequence_id"]: row for row in trained}
    rows = tables["sequences"].sort_by("segment")
    return {
        "sequences": [
            _sequence(rows.slice(i, 1), pieces, by_sequence) for i in range(rows.num_rows)
        ],
        "tokenizer": pieces.trouble,
        "damaged": damaged,
    }


def _sequence(row: pa.Table, pieces: Pieces, trained: dict[int, Any]) -> dict[str, Json]:
    ids_L = _values(row, "token_ids").astype(np.int32)
    texts, at = pieces.spell(ids_L)
    learner_row = trained.get(row.column("sequence_id")[0].as_py(), {})
    learner = learner_row.get("learner_logprobs")
    digits = 4 if learner is None else 6  # their difference is looked at
    return {
        **{
            name: row.column(name)[0].as_py() for name in ("segment", "lineage", "parent", "weight")
        },
        "ids": ids_L,
        "texts": texts,
        "at": at,
        "logprobs": np.round(_values(row, "logprobs"), digits),
        "learner": None if learner is None else np.round(np.array(learner, np.float32), digits),
        "advantage": learner_row.get("advantage"),
        "step": learner_row.get("step"),
        **{name: _values(row, name) for name in _SPANS},
    }


_SPANS: Sequence[str] = ("span_end", "span_kind", "span_version", "span_turn", "span_temperature")


def _values(row: pa.Table, name: str) -> Any:
    return row.column(name).combine_chunks().flatten().to_numpy()
