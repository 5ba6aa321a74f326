"""Causal attention over packed sequences, registered with transformers' AttentionInterface.

On a GPU in half precision it calls the variable-length kernel with `cu_seqlens`; elsewhere it
scatters to a right-padded tensor, attends causally and gathers back (with right padding `is_causal`
alone keeps a token from seeing the padding; a block-diagonal mask is 25 times slower on a CPU).

Shapes: T tokens, L the longest sequence, H heads, D head size. Not promised: sliding windows
shorter than a sequence, or attention dropout; the first is refused, the second never applied.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from prorl.errors import UserError

ATTENTION = "prorl_packed"

_HARMLESS = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "dropout", "is_causal", "logits_to_keep", "max_length_k",
        "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip
"""Arguments that models pass on to attention and that say nothing of what it computes here: there
is no cache, no dropout, and where sequences end is said by `cu_seq_lens_q`.
"""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pad_index: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each packed sequence.

    Query, key and value are [1, H, T, D], the answer [1, T, H, D]. Raises UserError for a sliding
    window that a sequence does not fit, and for whatever else a model asks of its attention (sinks,
    a soft cap): left out, its logprobs would be those of another model.
    """
    asked = sorted(
        name for name, value in others.items() if value is not None and name not in _HARMLESS
    )
    if asked:
        raise UserError(
            f"a model whose attention takes {', '.join(asked)}",
            "plain causal attention; train it by another trainer's door",
        )
    if sliding_window is not None and sliding_window < max_length_q:
        raise UserError(
            f"a sliding window of {sliding_window} tokens",
            f"sequences that fit, not one of {max_length_q}",
        )
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        out_THD = _varlen(query_THD, key_THD, value_THD, cu_seq_lens_q, max_length_q, scaling)
    else:
        out_THD = _padded(
            query_THD, key_THD, value_THD, len(cu_seq_lens_q) - 1, max_length_q, pad_index, scaling
        )
    return out_THD[None], None


def _varlen(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = query_THD.shape[1] != key_THD.shape[1]
    out = varlen_attn(
        query_THD.contiguous(),
        key_THD.contiguous(),
        value_THD.contiguous(),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _padded(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    num_sequences: int,
    longest: int,
    pad_index_T: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    def pad(x_THD: torch.Tensor) -> torch.Tensor:
        flat = x_THD.new_zeros(num_sequences * longest, *x_THD.shape[1:]).index_copy(
            0, pad_index_T, x_THD
        )
        return flat.view(num_sequences, longest, *x_THD.shape[1:]).transpose(1, 2)

    grouped = query_THD.shape[1] != key_THD.shape[1]
    out_BHLD = functional.scaled_dot_product_attention(
        pad(query_THD),
        pad(key_THD),
        pad(value_THD),
        is_causal=True,
        scale=scale,
        enable_gqa=grouped,
    )
    return out_BHLD.transpose(1, 2).flatten(0, 1).index_select(0, pad_index_T)
