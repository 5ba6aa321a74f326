"""The definition of a valid `Completion`: the one check that every model call passes.

Before its tokens count, whoever sampled them.

Invariants: at least one token unless the call was aborted; ids inside the vocabulary; one logprob
from `LEAST_LOGPROB` to 0 per id; versions tile the ids. A row of logits with a NaN is wrong as a
whole, so nothing is repaired here: the completion is refused.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from prorl.errors import BackendError
from prorl.types import UNKNOWN_VERSION, BackendFault, Completion, FailureCode, FinishReason

if TYPE_CHECKING:
    from prorl.types import Int32

LEAST_LOGPROB = -104.0
"""The smallest probability that float32 holds is e^-103.3: what is less likely is never sampled."""


def check_completion(completion: Completion, vocab_size: int, max_tokens: int) -> Completion:
    """Check what a backend said, and return the completion unchanged. Raises
    BackendError(BACKEND_PROTOCOL) naming the first thing that is wrong.
    """
    problem = _shape_problem(completion, max_tokens) or _value_problem(completion, vocab_size)
    if problem:
        raise BackendError(
            FailureCode.BACKEND_PROTOCOL, f"{completion.backend or 'backend'} sent {problem}"
        )
    return completion


def check_age(completion: Completion, oldest: int) -> None:
    """Refuse tokens of weights older than an attempt has seen, or than its lease allows: another
    server or another attempt is due. Raises BackendError (BEHIND).
    """
    versions = [version for version in completion.versions if version != UNKNOWN_VERSION]
    if (served := min(versions, default=oldest)) < oldest:
        raise BackendError(
            FailureCode.BACKEND_UNAVAILABLE,
            f"{completion.backend or 'backend'} serves version {served}, older than {oldest}",
            BackendFault.BEHIND,
        )


def _shape_problem(completion: Completion, max_tokens: int) -> str:
    ids_C, logprobs_C = completion.token_ids_C, completion.logprobs_C
    if (
        ids_C.ndim != 1
        or logprobs_C.ndim != 1
        or ids_C.dtype != np.int32
        or logprobs_C.dtype != np.float32
    ):
        return f"ids {ids_C.dtype}{ids_C.shape} and logprobs {logprobs_C.dtype}{logprobs_C.shape}"
    if len(ids_C) != len(logprobs_C):
        return f"{len(ids_C)} ids with {len(logprobs_C)} logprobs"
    if len(ids_C) == 0 and completion.finish_reason is not FinishReason.ABORT:
        return "no tokens"
    if len(ids_C) > max_tokens:
        return f"{len(ids_C)} tokens where at most {max_tokens} were asked for"
    ends = completion.version_ends
    if len(ends) != len(completion.versions) or (ends[-1] if ends else 0) != len(ids_C):
        return f"versions that do not cover its {len(ids_C)} tokens: ends {ends}"
    if any(start >= end for start, end in pairwise((0, *ends))):
        return f"version ends that do not grow: {ends}"
    return ""


def _value_problem(completion: Completion, vocab_size: int) -> str:
    ids_C, logprobs_C = completion.token_ids_C, completion.logprobs_C
    outside = np.flatnonzero((ids_C < 0) | (ids_C >= vocab_size))
    if len(outside):
        return (
            f"id {int(ids_C[outside[0]])} at {int(outside[0])}, outside a vocabulary of"
            f" {vocab_size}"
        )
    # NaN compares false with everything, so this finds NaN, infinities and positive values at once.
    bad = np.flatnonzero(~((logprobs_C <= 0) & (logprobs_C >= LEAST_LOGPROB)))
    if len(bad):
        value, place = float(logprobs_C[bad[0]]), int(bad[0])
        return f"logprob {value:g} at {place}; from {LEAST_LOGPROB:g} to 0 are possible"
    return ""


def num_shared(first_L: Int32, other_L: Int32) -> int:
    """Returns how many ids both begin with.

    >>> num_shared(np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32))
    2
    """
    count = min(len(first_L), len(other_L))
    differs_L = first_L[:count] != other_L[:count]
    return int(differs_L.argmax()) if differs_L.any() else count
