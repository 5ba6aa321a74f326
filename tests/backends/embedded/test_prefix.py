"""The prefix store: always the longest prefix, never more bytes than it may."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prorl.backends.embedded.prefix import PrefixStore

LENGTH = 12
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH), max_size=30)


def _saved(ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Stands for keys and values: the ids themselves, one float each."""
    return np.array(ids, dtype=np.float32).reshape(1, 1, 1, -1, 1)


@given(sequences, st.lists(st.integers(0, 2), min_size=1, max_size=LENGTH))
def test_find_gives_the_longest_common_prefix_of_all_that_was_added(
    added: list[list[int]], prompt: list[int]
) -> None:
    store = PrefixStore(1 << 20)
    for ids in added:
        store.add(np.array(ids, dtype=np.int32), _saved(ids))
    match = store.find(np.array(prompt, dtype=np.int32))
    pairs = [
        takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False)) for ids in added
    ]
    best = max((len([*same]) for same in pairs), default=0)
    assert (match.common if match else 0) == best
    if match:
        assert match.saved[0, 0, 0, : match.common, 0].tolist() == prompt[: match.common]


@given(sequences, st.integers(0, 100))
def test_bytes_stay_within_the_budget(added: list[list[int]], budget: int) -> None:
    store = PrefixStore(budget)
    for ids in added:
        store.add(np.array(ids, dtype=np.int32), _saved(ids))
        assert store.used_bytes <= budget
    store.clear()
    assert (store.used_bytes, len(store), store.find(np.zeros(1, dtype=np.int32))) == (0, 0, None)


def test_the_least_recently_used_goes_first_and_an_extended_entry_at_once() -> None:
    store = PrefixStore(4 * 6)
    for ids in ([1, 1, 1], [2, 2, 2]):
        store.add(np.array(ids, dtype=np.int32), _saved(ids))
    assert store.find(np.array([1], dtype=np.int32)) is not None
    store.add(np.array([0, 0], dtype=np.int32), _saved([0, 0]))
    assert store.find(np.array([2], dtype=np.int32)) is None
    store.add(np.array([1, 1, 1, 2], dtype=np.int32), _saved([1, 1, 1, 2]))
    assert len(store) == 2
