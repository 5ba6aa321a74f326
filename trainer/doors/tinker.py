"""Groups as Tinker's `Datum`, for `forward_backward(data, "importance_sampling")`.

Tinker's loss looks one token ahead: the inputs are all ids but the last, and targets, logprobs,
advantages and mask stand where their token is predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prorl.client.records import Record
from prorl.trainer.doors import check_version


def datum_of(record: Record) -> Any:
    """One sequence; its advantage is 0 wherever no token trains."""
    import tinker

    check_version("tinker")
    mask = record.mask[1:].astype(np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(record.ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": record.ids[1:].astype(np.int64),
            "logprobs": record.logprobs[1:],
            "advantages": mask * np.float32(record.advantage * record.weight),
            "mask": mask,
        },
    )
