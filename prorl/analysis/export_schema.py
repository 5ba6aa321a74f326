"""The columns of exported rows: which Arrow type each has, by its name."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from prorl.schema.fields import SPANS
from prorl.types import Json

_DTYPES = {
    "env_mask": pa.uint8(),
    "response_mask": pa.uint8(),
    "loss_mask": pa.uint8(),
    "sampled_mask": pa.uint8(),
}


def arrow_schema(row: Mapping[str, Json]) -> pa.Schema:
    """Columns of a token-carrying row: ids int32, logprobs float32, masks uint8, text, keys."""
    return pa.schema([(name, _dtype(name, value)) for name, value in row.items()])


def _dtype(name: str, value: Json) -> pa.DataType:
    if name in SPANS:
        return pa.list_(SPANS[name].value_type)
    if name in _DTYPES:
        return pa.list_(_DTYPES[name])
    if "log" in name and isinstance(value, list):
        return pa.list_(pa.float32())
    if name in ("prompts", "responses") or name.endswith("_ids"):
        return pa.list_(pa.int32())
    if name == "messages":
        return _MESSAGES
    if name == "reward":
        return pa.float32()
    return pa.utf8() if isinstance(value, str) else pa.int64()


_CALL = pa.struct([("name", pa.utf8()), ("arguments", pa.utf8())])


_MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", pa.utf8()),
            ("content", pa.utf8()),
            (
                "tool_calls",
                pa.list_(pa.struct([("id", pa.utf8()), ("type", pa.utf8()), ("function", _CALL)])),
            ),
            ("name", pa.utf8()),
            ("tool_call_id", pa.utf8()),
            ("reasoning_content", pa.utf8()),
        ]
    )
)
