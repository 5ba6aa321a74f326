"""What a body in vLLM's token subset asks for; ValueError says what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from prorl.types import GenerateRequest, Json, SamplingParams

if TYPE_CHECKING:
    from prorl.types import Int32


def read_request(
    body: Mapping[str, Json], model: str, vocab_size: int, session: str
) -> GenerateRequest:
    """The request that a body asks for. Raises ValueError with what is wrong."""
    if body.get("model") not in (None, "", model):
        raise ValueError(f"the model {body['model']!r} is not served; {model!r} is")
    if body.get("n", 1) != 1 or body.get("echo"):
        raise ValueError("echo and n > 1 are not served")
    for name, off in _OFF.items():
        if body.get(name, off) != off:
            raise ValueError(f"{name}: {off:g} is expected, others are not served")
    sampling = SamplingParams(
        temperature=_number(body, "temperature", 1.0, 0.0, 1e6),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31))),
        max_tokens=int(_number(body, "max_tokens", 16, 1, 1 << 24)),
    )
    stops = body.get("stop_token_ids") or []
    return GenerateRequest(
        prompt_ids_L=read_ids(body.get("prompt"), "prompt", vocab_size),
        sampling=sampling,
        seed=_integer(body, "seed"),
        stop_token_ids=tuple(read_ids(stops, "stop_token_ids", vocab_size).tolist())
        if stops
        else (),
        request_id=str(body.get("request_id") or time.monotonic_ns()),
        session=session,
        part_tokens=int(_number(body, "stream_interval", 1, 1, 1 << 16)),
    )


_OFF = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def read_ids(values: Json, name: str, vocab_size: int) -> Int32:
    """A list of ids below `vocab_size`, not empty. Raises ValueError that names it."""
    array = np.asarray(values if isinstance(values, list) else None)
    if array.ndim != 1 or array.dtype.kind != "i" or not len(array):
        raise ValueError(f"{name}: a list of token ids is expected")
    if array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(
            f"{name}: ids from 0 to {vocab_size - 1} are expected, found {array.min()} to"
            f" {array.max()}"
        )
    ids: np.ndarray[tuple[int], np.dtype[np.int32]] = array.astype(np.int32)
    return ids


def _number(body: Mapping[str, Json], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name}: a number from {low:g} to {high:g} is expected, found {value!r}")
    return value


def _integer(body: Mapping[str, Json], name: str) -> int:
    value = body.get(name)
    if value is None:
        return time.time_ns() >> 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: an integer >= 0 is expected, found {value!r}")
    return value
