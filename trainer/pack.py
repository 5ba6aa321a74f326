"""One forward pass over packed sequences, for any Hugging Face causal model.

Linear layers see the T tokens end to end, as they lie in Arrow; only attention must know where
sequences end, so that none sees another (`attention.py`).

Linear layers see the T tokens end to end, as they lie in Arrow; only attention must know where
sequences end. It is a function registered with transformers' AttentionInterface: on a GPU in half
precision it calls the variable-length kernel with `cu_seqlens`; elsewhere it scatters to a
right-padded tensor, attends causally and gathers back (with right padding `is_causal` alone keeps a
token from seeing the padding; a block-diagonal mask is 25 times slower on a CPU).

Shapes: B sequences, T tokens, L the longest, C sampled tokens, H heads, D head size, V vocabulary.
Not promised: sliding windows shorter than a sequence, or attention dropout; the first is refused,
the second never applied.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from prorl.client import PackedBatch
from prorl.errors import ConfigError, UserError
from prorl.trainer.attention import ATTENTION, packed_attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """The tensors of a forward pass."""

    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32 [B+1]."""
    max_seqlen: int
    pad_index_T: torch.Tensor
    """Where a token lies in the right-padded [B * L]."""
    sampled_C: torch.Tensor
    """Positions of the sampled tokens."""
    temperature_C: torch.Tensor

    def to(self, device: str | torch.device) -> Packed:
        """The same on a device; copies from pinned memory are not waited for."""
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if field.name != "max_seqlen"
        }
        return replace(self, **moved)


class TokenLogprobs(NamedTuple):
    """Logprobs and entropies of the sampled tokens, under the policy at the recorded temperature.

    Entropy has no gradient.
    """

    logprobs_C: torch.Tensor
    entropy_C: torch.Tensor


def pack(batch: PackedBatch, device: str | torch.device = "cpu") -> Packed:
    """Tensors of a batch; ids stay int32 over Arrow's memory on a CPU. Raises UserError."""
    tensors = batch.torch()
    starts = tensors.cu_seqlens[:-1].long()
    lengths = tensors.cu_seqlens.diff().long()
    position_ids_T = torch.arange(batch.num_tokens) - starts.repeat_interleave(lengths)
    rows = torch.arange(batch.num_sequences).repeat_interleave(lengths)
    packed = Packed(
        token_ids_T=tensors.token_ids,
        position_ids_T=position_ids_T,
        cu_seqlens=tensors.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        pad_index_T=rows * batch.max_seqlen + position_ids_T,
        sampled_C=torch.from_numpy(batch.sampled_index()),
        temperature_C=torch.from_numpy(batch.per_sampled(batch.span_temperature)),
    )
    _refuse_untrainable(packed)
    return packed.to(device)


def _refuse_untrainable(packed: Packed) -> None:
    """Raises UserError for sampled tokens that have no probability, or no policy ratio."""
    if bool((packed.position_ids_T[packed.sampled_C] == 0).any()):
        raise UserError(
            "a sequence begins with a sampled token", "at least one token of context before it"
        )
    if bool((packed.temperature_C <= 0).any()):
        raise UserError(
            "tokens sampled at temperature 0",
            "a temperature above 0: greedy tokens have no policy ratio",
        )


def load_model(path: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A causal model from a Hugging Face directory, with packed attention and without dropout.

    Raises ConfigError.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, packed_attention)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {path}: {str(error).splitlines()[0]}",
            "a directory with config.json and safetensors",
        ) from None
    return model.to(device).eval()


def token_logprobs(model: Any, packed: Packed) -> TokenLogprobs:
    """log pi(token | what came before it) of every sampled token, at its recorded temperature.

    Logits are computed only where a sampled token is predicted: [C, V], never [T, V].
    """
    logits_CV = _sampled_logits(model, packed).float() / packed.temperature_C[:, None]
    all_CV = functional.log_softmax(logits_CV, dim=-1)
    targets_C = packed.token_ids_T[packed.sampled_C].long()
    logprobs_C = all_CV.gather(1, targets_C[:, None])[:, 0]
    with torch.no_grad():
        entropy_C = -(all_CV.exp() * all_CV).nan_to_num().sum(-1)
    return TokenLogprobs(logprobs_C, entropy_C)


def _sampled_logits(model: Any, packed: Packed) -> torch.Tensor:
    """Logits [C, V], each one position before the token that it predicts."""
    output = model(
        input_ids=packed.token_ids_T[None],
        position_ids=packed.position_ids_T[None],
        use_cache=False,
        logits_to_keep=packed.sampled_C - 1,
        cu_seq_lens_q=packed.cu_seqlens,
        cu_seq_lens_k=packed.cu_seqlens,
        max_length_q=packed.max_seqlen,
        max_length_k=packed.max_seqlen,
        pad_index=packed.pad_index_T,
    )
    logits_CV: torch.Tensor = output.logits[0]
    return logits_CV
