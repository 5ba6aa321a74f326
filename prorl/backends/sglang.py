"""SGLang over HTTP, token ids in and out.

`POST /generate` with `input_ids` and `return_logprob`, streamed: `VllmBackend` with other words,
and the same checks. What differs:

- A reply says which weights sampled which tokens (`weight_versions`); older servers name one
  label, and are asked before and after the call.
- Its logprobs are those of the whole distribution, whatever `top_p` and `top_k` say. Where they
  cut, the token's logprob within what is left is asked for (`return_sampling_mask`), which it gives
  for at most `--sampling-mask-max-tokens` (4096) tokens; a request with more fails.
- Each event repeats all tokens, unless the server runs with `--incremental-streaming-output`: then
  events come as often as vLLM's, else more rarely.
- Seeds count with `--enable-deterministic-inference` alone.

Protocol as its source of 0.5.23 has it; no server ran here, tests have a stand-in.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from prorl.backends.vllm import VllmBackend
from prorl.backends.weight_target import LOADING, WeightCall, WeightDialect
from prorl.errors import BackendError
from prorl.types import FailureCode, GenerateRequest, Json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.backends.catalogue import BackendContext

ANY_TOP_K = 1 << 20
"""At least this many tokens are all of them, in every vocabulary."""
REPEATED = 16
"""Events that repeat all tokens come so much more rarely."""
_PAUSES = {"abort": "abort", "keep": "retract"}


def open_sglang(url: str, context: BackendContext) -> SglangBackend:
    return SglangBackend(
        url, context.renderer.vocab_size, model=context.model, api_key=context.api_key
    )


class SglangBackend(VllmBackend):
    """Implements `prorl.protocols.ProbedBackend`."""

    path, label_path, health_path = "/generate", "/model_info", "/ping"
    _repeats = False

    async def _cards(self) -> dict[str, Mapping[str, Json]]:
        """The one model that it has, which a load of weights renames to their directory."""
        cards = await super()._cards()
        return {self._model or name: card for name, card in [*cards.items()][:1]}

    def _body(self, request: GenerateRequest, model: str, wire_id: str) -> dict[str, Json]:
        sampling = request.sampling
        interval = self._limits.stream_interval * (REPEATED if self._repeats else 1)
        return {
            "rid": wire_id,
            "input_ids": np.ascontiguousarray(request.prompt_ids_L),
            "return_logprob": True,
            "return_sampling_mask": _cuts(request),
            "return_routed_experts": request.routing_from >= 0,
            "routed_experts_start_len": max(request.routing_from, 0),
            "stream": interval > 0,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if 0 < sampling.top_k < ANY_TOP_K else -1,
                # What is left out it takes from `--preferred-sampling-params`.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": request.seed,
                "stop_token_ids": request.stop_token_ids,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "stream_interval": interval or None,
            },
        }

    def _object(self, value: Json, request: GenerateRequest, num_tokens: int) -> Json:
        if value.get("error") is not None:
            return value
        meta, ids = value["meta_info"], value["output_ids"]
        reason = meta["finish_reason"] or {}
        if (reason.get("status_code") or 0) >= 400:
            return {"error": reason}
        columns = [*zip(*meta.get("output_token_logprobs") or [], strict=True)] or [(), ()]
        logprobs, their_ids = [*columns[0]], [*columns[1]]
        if _cuts(request):
            logprobs = meta.get("output_token_sampling_logprobs") or []
        count, start = meta["completion_tokens"], 0
        if num_tokens and len(their_ids) == count:
            self._repeats, start = True, num_tokens
        elif reason.get("type") == "abort" and num_tokens == count:
            start = len(ids)  # cut while it waited: nothing more, the last token once more
        elif len(their_ids) + num_tokens != count:
            raise ValueError(f"{len(their_ids)} logprobs, of {count} tokens, {num_tokens} known")
        if their_ids[start:] != ids[start:]:
            raise ValueError(f"output_ids {str(ids)[:80]}, logprobs of {str(their_ids)[:80]}")
        prompt = meta.get("prompt_tokens", len(request.prompt_ids_L))
        routed = meta.get("routed_experts")
        choice = {
            "routed_experts": routed and _routed(routed, prompt + count - 1 - request.routing_from),
            "token_ids": ids[start:],
            "logprobs": {"token_logprobs": logprobs[start:]},
            "finish_reason": reason.get("type"),
            "stop_reason": reason.get("matched"),
            "weight_versions": [
                {"version": span["version"], "end": span["end"] - num_tokens}
                for span in meta.get("weight_versions") or ()
                if span["end"] > num_tokens
            ],
        }
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": meta.get("cached_tokens", 0)},
        }
        return {"id": f"cmpl-{meta['id']}", "choices": [choice], "usage": usage}


def _routed(value: str, num_tokens: int) -> NDArray[np.int32]:
    """Its int32, which say no shape. Raises ValueError where they are not of `num_tokens`."""
    return np.frombuffer(base64.b64decode(value), "<i4").reshape(num_tokens, -1)


def _cuts(request: GenerateRequest) -> bool:
    """Returns whether the distribution that it asks for is only a part of the model's."""
    return request.sampling.top_p < 1.0 or 0 < request.sampling.top_k < ANY_TOP_K


def _pause(mode: str) -> WeightCall:
    if mode not in _PAUSES:
        raise BackendError(
            FailureCode.BACKEND_PROTOCOL,
            f"SGLang cannot pause by {mode!r}: {' or '.join(_PAUSES)} is expected",
        )
    return WeightCall("/pause_generation", {"mode": _PAUSES[mode]})


def _rename(label: str) -> WeightCall:
    body = {"new_version": label, "abort_all_requests": False}
    return WeightCall("/update_weight_version", body)


WEIGHTS = WeightDialect(
    name="sglang",
    update=lambda path, version, label, model: (
        _rename(LOADING),
        WeightCall("/update_weights_from_disk", {"model_path": path, "weight_version": label}),
    ),
    takes_adapters=False,
    pause=_pause,
    resume=WeightCall("/continue_generation", {}),
    label_path="/model_info",
    rename=_rename,
)
