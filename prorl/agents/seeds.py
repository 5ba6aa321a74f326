"""Where sampling seeds come from: identity alone, never time, so that a seeded run repeats."""

from __future__ import annotations

from hashlib import blake2b

from prorl.types import Json


def derive_seed(
    run_seed: int, task_id: str, sample_index: int, attempt: int, turn: int, part: int = 0
) -> int:
    """63-bit seed of one model call.

    `part` counts the pieces of a turn that weight updates interrupted.

    >>> derive_seed(0, "gsm8k/0", 0, 1, 0) == derive_seed(0, "gsm8k/0", 0, 1, 0)
    True
    >>> derive_seed(0, "gsm8k/0", 0, 1, 0) == derive_seed(0, "gsm8k/0", 1, 1, 0)
    False
    """
    identity: tuple[Json, ...] = (run_seed, task_id, sample_index, attempt, turn, part)
    # repr keeps (1, "23") and (12, "3") apart.
    return (
        int.from_bytes(
            blake2b(repr(identity).encode("utf-8", "replace"), digest_size=8).digest(), "big"
        )
        >> 1
    )
