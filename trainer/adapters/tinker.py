"""Groups as Tinker's `Datum`, for `forward_backward(data, "importance_sampling")`.

Tinker's loss looks one token ahead: the inputs are all ids but the last, and targets, logprobs,
advantages and mask stand where their token is predicted. It sums over tokens, each of which is in
one sequence alone, so that a rollout of several sequences counts once; divide advantages by the
step's trained tokens for a mean. Its logprobs are those of temperature 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prorl.client.records import Record
from prorl.trainer.adapters import check_temperature, check_version


def datum_of(record: Record) -> Any:
    """One sequence; its advantage is 0 wherever no token trains. Raises UserError for one that was
    not sampled at temperature 1.
    """
    import tinker

    check_version("tinker")
    check_temperature([record], 1.0, "Tinker's loss")
    mask = record.mask[1:].astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(record.ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": record.ids[1:].astype(np.int64),
            "logprobs": record.logprobs[1:],
            "advantages": mask * np.float32(record.advantage),
            "mask": mask,
        },
    )
