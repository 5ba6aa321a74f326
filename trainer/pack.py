"""One forward pass over packed sequences, proved for each model before it trains.

Linear layers see the T tokens end to end, as they lie in Arrow; only attention must know where
sequences end (`packed_attention`). Models that carry state from token to token elsewhere (recurrent
and convolutional layers), or ask more of attention than that, give other logprobs when packed:
`prove` compares with the model's own eager pass, one sequence at a time, and refuses them.

Weights are float32, whatever they compute in: at the rates of policy updates most steps are too
small for a bfloat16 weight to move.

Shapes: B sequences, T tokens, L the longest, C sampled tokens, V vocabulary; E hidden size; of
attention H heads of size D.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from prorl.client import PackedBatch
from prorl.errors import ConfigError, UserError

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
    """Causal attention inside each packed sequence, registered with transformers.

    On a GPU in half precision by the variable-length kernel; elsewhere over a right-padded tensor
    (there `is_causal` alone keeps a token from seeing the padding; a block-diagonal mask is 25
    times slower on a CPU). Query, key and value are [1, H, T, D], the answer [1, T, H, D]. Raises
    UserError for a sliding window that a sequence does not fit, and for whatever else a model asks
    of its attention (sinks, a soft cap): left out, its logprobs would be those of another model.
    """
    features = sorted(
        name for name, value in others.items() if value is not None and name not in _HARMLESS
    )
    if features:
        raise UserError(
            f"a model whose attention takes {', '.join(features)}",
            "plain causal attention; train it by another trainer's adapter",
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    token_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    """int32 [B+1]."""
    max_seqlen: int
    pad_index_T: torch.Tensor
    """The place of a token in the right-padded [B * L]."""
    sampled_C: torch.Tensor
    """Positions of the sampled tokens."""
    temperature_C: torch.Tensor

    def to(self, device: str | torch.device) -> Packed:
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if field.name != "max_seqlen"
        }
        return replace(self, **moved)


class TokenLogprobs(NamedTuple):
    """Logprobs of the sampled tokens at their recorded temperature; entropy has no gradient."""

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
    # Raises UserError for sampled tokens that have no probability, or no policy ratio.
    if bool((packed.position_ids_T[packed.sampled_C] == 0).any()):
        raise UserError(
            "a sequence begins with a sampled token", "at least one token of context before it"
        )
    if bool((packed.temperature_C <= 0).any()):
        raise UserError(
            "tokens sampled at temperature 0",
            "a temperature above 0: greedy tokens have no policy ratio",
        )
    return packed.to(device)


LOGITS_BYTES = 256 << 20
"""The limit of the logits that exist at once; more tokens are predicted chunk by chunk, each
computed again for its gradient.
"""
PROOF_LENGTHS = (7, 12, 5)
PROOF_MAX_ERROR = 1e-3
"""The greatest error of a logprob in float32; right models are below 1e-4, wrong ones above 1."""


def load_model(path: str | Path, *, device: str = "cpu") -> Any:
    """A causal model from a Hugging Face directory, in float32, with packed attention and without
    dropout. Raises ConfigError, also for a model that `prove` refuses.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, packed_attention)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model {path}: {str(error).splitlines()[0]}",
            "a directory with config.json and safetensors",
        ) from None
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # of a device that is not there
        raise ConfigError(
            f"device {device}: {str(error).splitlines()[0]}", "cpu, or a GPU that torch sees"
        ) from None
    try:
        prove(model)
    except UserError as error:
        raise ConfigError(f"model {path}: {error}") from None
    return model


@torch.no_grad()
def prove(model: Any) -> None:
    """One packed pass against the model's own eager passes, one sequence at a time. A model whose
    logits are not its head's alone (scaled, capped) is marked: it never computes them in chunks.
    Raises UserError for one whose logprobs packing changes.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if "chunked_attention" in kinds:
        raise UserError("a model with chunked attention", "full or sliding attention")
    vocab = model.get_output_embeddings().weight.shape[0]
    random = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocab, (length,), generator=random) for length in PROOF_LENGTHS]
    lengths = torch.tensor(PROOF_LENGTHS)
    position_ids_T = torch.cat([torch.arange(length) for length in PROOF_LENGTHS])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    packed = Packed(
        token_ids_T=torch.cat(sequences).int(),
        position_ids_T=position_ids_T,
        cu_seqlens=functional.pad(lengths.cumsum(0), (1, 0)).int(),
        max_seqlen=max(PROOF_LENGTHS),
        pad_index_T=rows * max(PROOF_LENGTHS) + position_ids_T,
        sampled_C=(position_ids_T > 0).nonzero()[:, 0],
        temperature_C=torch.ones(int((position_ids_T > 0).sum())),
    ).to(model.device)
    try:
        whole_C = token_logprobs(model, packed).logprobs_C
        model.prorl_chunks = True
        chunked_C = token_logprobs(model, packed, rows_per_chunk=4).logprobs_C
        model.set_attn_implementation("eager")
        alone = []
        for ids in sequences:
            logits_LV = model(ids[None].to(model.device), use_cache=False).logits[0]
            logprobs_LV = functional.log_softmax(logits_LV[:-1].float(), -1)
            alone.append(logprobs_LV.gather(1, ids[1:, None].to(model.device))[:, 0])
    except UserError:
        raise
    except (RuntimeError, ValueError, ImportError) as error:  # its own code says that it cannot
        raise UserError(
            f"{type(model).__name__}, which cannot be packed: {str(error).splitlines()[0]}",
            "a model that can",
            "train it by another trainer's adapter",
        ) from None
    finally:
        model.set_attn_implementation(ATTENTION)
    alone_C = torch.cat(alone)
    model.prorl_chunks = float((chunked_C - alone_C).abs().max()) <= PROOF_MAX_ERROR
    worst = float((whole_C - alone_C).abs().max())
    if not worst <= PROOF_MAX_ERROR:
        raise UserError(
            f"{type(model).__name__} gives other logprobs when it is packed, by up to {worst:.2g}",
            f"at most {PROOF_MAX_ERROR:g}",
            "train it by another trainer's adapter",
        )


def token_logprobs(
    model: Any,
    packed: Packed,
    *,
    dtype: torch.dtype = torch.float32,
    rows_per_chunk: int | None = None,
) -> TokenLogprobs:
    """log pi(token | what came before it) of every sampled token, at its recorded temperature.
    Logits are computed only where a sampled token is predicted, and of at most `rows_per_chunk`
    tokens at once (default: what `LOGITS_BYTES` hold). `dtype` is what matrices are multiplied in.
    """
    targets_C = packed.token_ids_T[packed.sampled_C].long()
    head = model.get_output_embeddings()
    rows = rows_per_chunk or max(1, LOGITS_BYTES // (4 * head.weight.shape[0]))
    with torch.autocast(packed.token_ids_T.device.type, dtype, enabled=dtype != torch.float32):
        if len(targets_C) <= rows or not model.prorl_chunks:
            logits_CV = _forward(model, packed, logits_to_keep=packed.sampled_C - 1).logits[0]
            return TokenLogprobs(*_of_logits(logits_CV, targets_C, packed.temperature_C))
        hidden_CH = _forward(model.base_model, packed).last_hidden_state[0, packed.sampled_C - 1]
        chunks = [
            checkpoint(
                lambda hidden, *rest: _of_logits(head(hidden), *rest), *chunk, use_reentrant=False
            )
            for chunk in zip(
                *(tensor.split(rows) for tensor in (hidden_CH, targets_C, packed.temperature_C)),
                strict=True,
            )
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies))


def _of_logits(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, temperature_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    all_CV = functional.log_softmax(logits_CV.float() / temperature_C[:, None], dim=-1)
    with torch.no_grad():
        entropy_C = -(all_CV.exp() * all_CV).nan_to_num().sum(-1)
    return all_CV.gather(1, targets_C[:, None])[:, 0], entropy_C


def _forward(model: Any, packed: Packed, **options: Any) -> Any:
    return model(
        input_ids=packed.token_ids_T[None],
        position_ids=packed.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=packed.cu_seqlens,
        cu_seq_lens_k=packed.cu_seqlens,
        max_length_q=packed.max_seqlen,
        max_length_k=packed.max_seqlen,
        pad_index=packed.pad_index_T,
        **options,
    )
