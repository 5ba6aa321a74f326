"""Times of the day with a.m. or p.m.: `2:30 p.m.`."""

from __future__ import annotations

import re

from prorl.envs.answers.dress import plain_of
from prorl.envs.answers.words import bare

_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def same_time(reference: str, answer: str) -> bool | None:
    """A time of the day, where the reference has a.m. or p.m."""
    wanted = _seconds(reference)
    if wanted is None:
        return None
    answer = re.sub(r"^(?:at|by)\s+", "", bare(answer))
    given = _seconds(bare(answer))
    if given is None and (found := _CLOCK.fullmatch(bare(plain_of(answer)))):
        hour = int(found[1])
        given = (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)
        return given in (wanted, wanted - 12 * 3600 if hour <= 12 else wanted)
    return given == wanted


def _seconds(text: str) -> int | None:
    """Seconds since midnight of `2:30 p.m.`."""
    found = _TIME.fullmatch(
        " ".join(
            plain_of(text.replace("\\text", " ").replace("\\ ", " "))
            .replace("{", " ")
            .replace("}", " ")
            .replace("~", " ")
            .split()
        )
    )
    if found is None or not 1 <= int(found[1]) <= 12:
        return None
    hour = int(found[1]) % 12 + 12 * (found[4].lower() == "p")
    return (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)
