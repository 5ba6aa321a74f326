"""Counts in sentences: one helper for the noun's number, so that no text says `1 groups`."""

from __future__ import annotations


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Returns a count and its noun; `plural` where it is more than the noun and an `s`.

    >>> pluralize(1, "group"), pluralize(12_500, "kept group")
    ('1 group', '12,500 kept groups')
    >>> pluralize(1, "rollout waits", "rollouts wait")
    '1 rollout waits'
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
