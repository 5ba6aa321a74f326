"""Content stays text, also where a template writes two strings side by side."""

from __future__ import annotations

from prorl.renderer.guard import CLOSE, OPEN, Guard
from prorl.tokenizer import SPECIALS, ByteTokenizer

TOKENIZER = ByteTokenizer()
GUARD = Guard(TOKENIZER)


def test_two_strings_side_by_side_spell_no_marker() -> None:
    for special in SPECIALS:
        for cut in range(2, len(special)):
            text = GUARD.fence_text(special[:cut]) + GUARD.fence_text(special[cut:])
            assert (GUARD.encode(text) < 256).all()


def test_what_the_template_writes_is_a_marker() -> None:
    ids = GUARD.encode("a<think>b")
    assert TOKENIZER.decode(ids) == "a<think>b"
    assert ids.tolist() == [97, TOKENIZER.specials["<think>"], 98]


def test_a_fence_that_lost_its_half_cuts_and_vanishes() -> None:
    assert TOKENIZER.decode(GUARD.encode(f"a{OPEN}b{CLOSE}c{OPEN}")) == "abc"
    assert (GUARD.encode(f"{OPEN}<think>") >= 256).sum() == 1


def test_keys_and_values_are_fenced_at_any_depth() -> None:
    value = GUARD.fence({"<think>": [{"a": "</think>"}, 1, None]})
    assert value == {f"{OPEN}<think>{CLOSE}": [{"a": f"{OPEN}</think>{CLOSE}"}, 1, None]}
