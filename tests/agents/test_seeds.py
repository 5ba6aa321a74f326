"""Seeds depend on identity alone and differ where identity does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl.agents.sampler import derive_seed

identities = st.tuples(st.integers(0, 2**62), st.text(), *([st.integers(0, 1000)] * 4))


@given(identities)
def test_seeds_fit_63_bits_and_repeat(identity: tuple[int, str, int, int, int, int]) -> None:
    assert 0 <= derive_seed(*identity) < 2**63
    assert derive_seed(*identity) == derive_seed(*identity)


@given(st.sets(identities, min_size=2, max_size=20))
def test_other_identities_have_other_seeds(some: set[tuple[int, str, int, int, int, int]]) -> None:
    assert len({derive_seed(*identity) for identity in some}) == len(some)


def test_the_value_never_changes() -> None:
    """Stored runs repeat with later versions of this code."""
    assert derive_seed(0, "gsm8k/0", 0, 1, 0) == 4304678167316362432
