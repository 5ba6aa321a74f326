"""A completion from what vLLM sends: one JSON object, or a stream of events with a few tokens each.

Invariants: what makes no sense, or contradicts the request or itself, raises (KeyError, TypeError,
ValueError), and nothing is repaired: a reply says whose it is (`id`, `model`, `index`, the prompt's
ids or their number), how many tokens it has (`usage`, the request's limit) and why it ended (the
stop ids), and all of it must agree. Ids and logprobs become arrays once for each part that is
handed on. Not promised: that ids and logprobs of the right shape and number are the model's own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from prorl.backends.labels import version_of
from prorl.types import Completion, FinishReason, GenerateRequest, Json, PolicyVersion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Int16, Int32

DONE = b"[DONE]"
NAMED = "token_id:"
MAX_EVENT_BYTES = 8 << 20


class VllmReply:
    """One reply while it comes.

    `models`: the names that the asked model may be called by; empty = any. `is_fitted`: the
    request asks for no more tokens than the server's context has room for.
    """

    def __init__(
        self,
        request: GenerateRequest,
        backend: str,
        *,
        id: str,
        models: Collection[str] = (),
        is_fitted: bool = True,
    ) -> None:
        self._request, self._backend, self._id = request, backend, id
        self._models, self._is_fitted = models, is_fitted
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._marks: list[tuple[int, str]] = []
        """(end, label), where the server states labels."""
        self._routing: Int16 | None = None
        self._cached = 0
        self._counted = -1
        """Tokens by the server's own last count; -1 = it has not said."""
        self.finish: FinishReason | None = None

    @property
    def states_labels(self) -> bool:
        return bool(self._marks) or not self._ids

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def take(self, value: Json) -> None:
        """One object: the whole reply or a piece of it. Raises what a malformed one leads to."""
        if value.get("error") is not None:
            raise ValueError(f"an error in the stream: {str(value['error'])[:200]}")
        if value["id"] != self._id:
            raise ValueError(f"a reply to {str(value['id'])[:200]!r}, not to {self._id!r}")
        if self._models and value.get("model", "") not in ("", *self._models):
            raise ValueError(f"a reply of {str(value['model'])[:200]!r}")
        choices, usage = value["choices"], value.get("usage")
        if choices:
            (choice,) = choices
            if self.finish is not None:
                raise ValueError("a piece behind the last")
            if choice.get("index", 0) != 0:
                raise ValueError(f"choice {str(choice['index'])[:80]}, where one was asked for")
            prompt = choice.get("prompt_token_ids")
            if prompt is not None and not np.array_equal(prompt, self._request.prompt_ids_L):
                raise ValueError("a reply to another prompt")
            self._take_tokens(choice)
            routed = choice.get("routed_experts")
            if routed is not None and self._request.routing_from >= 0:
                self._routing = _routing(routed)
            if choice.get("finish_reason") is not None:
                self.finish = FinishReason(choice["finish_reason"])
                self._check_end(choice.get("stop_reason"))
        elif usage is None:
            raise ValueError("a piece without a choice")
        if usage is not None:
            self._take_usage(usage)

    def _take_tokens(self, choice: Json) -> None:
        ids, start = choice["token_ids"], len(self._ids)
        named = choice["logprobs"] or {"token_logprobs": []}
        logprobs = named["token_logprobs"]
        if not _are(ids, int) or not _are(logprobs, int, float):
            raise ValueError(f"token_ids {str(ids)[:80]}, token_logprobs {str(logprobs)[:80]}")
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids with {len(logprobs)} logprobs")
        for name in ("tokens", "text_offset", "top_logprobs"):
            if isinstance(named.get(name), list) and len(named[name]) != len(ids):
                raise ValueError(f"{len(ids)} ids with {len(named[name])} {name}")
        _check_names(ids, logprobs, named.get("tokens"), named.get("top_logprobs"))
        self._ids += ids
        self._logprobs += logprobs
        limit, stops = self._request.sampling.max_tokens, self._request.stop_token_ids
        if len(self._ids) > limit:
            raise ValueError(f"{len(self._ids)} tokens where at most {limit} were asked for")
        if ids and any(token_id in stops for token_id in self._ids[max(start - 1, 0) : -1]):
            raise ValueError("tokens behind a stop token")
        for mark in choice.get("weight_versions") or ():
            last = self._marks[-1][0] if self._marks else 0
            if (begins := start + int(mark.get("start", last - start))) != last:
                raise ValueError(f"weights of token {begins} on, where {last} have theirs")
            self._marks.append((start + int(mark["end"]), str(mark["version"])))

    def _check_end(self, stop_reason: Json) -> None:
        """The reason for the end, against how it ends."""
        stops, last = self._request.stop_token_ids, self._ids[-1] if self._ids else -1
        count, limit = len(self._ids), self._request.sampling.max_tokens
        if self.finish is FinishReason.STOP and stops and last not in stops:
            raise ValueError(
                f"an end by a stop token, and {last} is none of {stops}: is the model's"
                " generation_config.json beside the run's tokenizer?"
            )
        if self.finish is FinishReason.ABORT and last in stops:
            raise ValueError(f"cut behind {last}, which ends it")
        if stop_reason is not None and stop_reason != last:  # no texts were asked for
            raise ValueError(f"an end by {str(stop_reason)[:80]!r} behind {last}")
        if self.finish is FinishReason.LENGTH and (
            last in stops or (count < limit and self._is_fitted)
        ):
            raise ValueError(
                f"an end by length with {count} of {limit} tokens, the last {last}: has the model a"
                " max_new_tokens? (vLLM: --generation-config vllm)"
            )

    def _take_usage(self, usage: Json) -> None:
        prompt, sampled = usage["prompt_tokens"], usage["completion_tokens"]
        if prompt != len(self._request.prompt_ids_L):
            raise ValueError(
                f"a reply to {prompt} tokens of prompt, not {len(self._request.prompt_ids_L)}"
            )
        if sampled != len(self._ids):
            raise ValueError(f"{sampled} tokens by its count, and {len(self._ids)} came")
        if usage.get("total_tokens", prompt + sampled) != prompt + sampled:
            raise ValueError(f"{prompt} and {sampled} tokens make {usage['total_tokens']}")
        self._counted = sampled
        details = usage.get("prompt_tokens_details") or {}
        self._cached = int(details.get("cached_tokens") or self._cached)
        if not 0 <= self._cached <= prompt:
            raise ValueError(f"{self._cached} of {prompt} tokens of prompt from the cache")

    def part(self, label: str | None = "") -> Completion:
        """Returns what came so far, as an aborted completion; without a label its weights are
        unknown.
        """
        return self._completion(FinishReason.ABORT, label)

    def completion(self, label: str | None, llm_s: float = 0.0) -> Completion:
        """All of it; `label` is that of tokens for which the reply states none."""
        if self.finish is None:
            raise ValueError("half a reply: it ended without a finish_reason")
        if self._counted != len(self._ids):
            raise ValueError("a reply that does not say how many tokens it has (usage)")
        return self._completion(self.finish, label, llm_s)

    def _completion(
        self, finish: FinishReason, label: str | None, llm_s: float = 0.0
    ) -> Completion:
        ends, versions = self._versions(label)
        return Completion(
            token_ids_C=_ids(self._ids),
            logprobs_C=np.asarray(self._logprobs, np.float32),
            finish_reason=finish,
            version_ends=ends,
            versions=versions,
            cached_tokens=self._cached,
            llm_s=llm_s,
            backend=self._backend,
            routed_experts=self._routing,
        )

    def _versions(self, label: str | None) -> tuple[tuple[int, ...], tuple[PolicyVersion, ...]]:
        count = len(self._ids)
        marks: list[tuple[int, str | None]] = [*self._marks] or ([(count, label)] if count else [])
        ends: list[int] = []
        versions: list[PolicyVersion] = []
        for end, stated in marks:
            version = version_of(stated, self._request)
            if versions and versions[-1] == version and end > ends[-1]:
                ends[-1] = end
            else:
                ends.append(end)
                versions.append(version)
        return tuple(ends), tuple(versions)


class EventParser:
    """Cuts a byte stream into the data of server-sent events. Bounded: `max_bytes` an event."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []
        """The parts of a line that has not ended; joined once, when it does."""
        self._rest_bytes = 0
        self.is_done = False

    def feed(self, part: bytes) -> Iterator[Json]:
        """The objects that this part completes.

        Raises ValueError for what is no JSON, has no end or comes behind the end.
        """
        first, *others = part.split(b"\n")
        self._rest.append(first)
        self._rest_bytes += len(first)
        if self._rest_bytes > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes")
        if not others:
            return
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest, self._rest_bytes = [others[-1]], len(others[-1])
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if self.is_done:
                raise ValueError(f"an event behind {DONE.decode()}")
            if data == DONE:
                self.is_done = True
            else:
                yield orjson.loads(data)


def _check_names(ids: list[int], logprobs: list[float], names: Json, likely: Json) -> None:
    """Checks the tokens' names, which say the ids once more. Raises ValueError.

    Names are `token_id:ID` where the server heeds `return_tokens_as_token_ids`; texts are believed.
    """
    if not names:
        return
    expected = [f"{NAMED}{token_id}" for token_id in ids]
    if str(names[0]).startswith(NAMED) and names != expected:
        raise ValueError(f"token_ids {str(ids)[:80]}, called {str(names)[:80]}")
    for name, logprob, others in zip(names, logprobs, likely or (), strict=False):
        if others and others.get(name, logprob) != logprob:
            raise ValueError(f"logprobs {logprob} and {others[name]} of {name!r:.80}")


def _are(values: Json, *types: type) -> bool:
    """Returns whether it is a list of nothing but such; JSON's true is no number."""
    return isinstance(values, list) and {*map(type, values)} <= {*types}


def _routing(value: str | NDArray[Any]) -> Int16:
    """Experts as [tokens, layers * top_k]: base64 of what `numpy.save` writes, or an array."""
    experts = (
        np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
        if isinstance(value, str)
        else value
    )
    if experts.ndim < 2 or not experts[0].size or experts.dtype.kind not in "iu":
        raise ValueError(f"routing of experts {experts.dtype}{experts.shape}")
    flat = experts.reshape(len(experts), -1)
    if flat.min() < -1 or flat.max() > np.iinfo(np.int16).max:
        raise ValueError(f"experts {flat.min()} to {flat.max()}")
    return flat.astype(np.int16)


def _ids(values: list[int]) -> Int32:
    try:
        return np.asarray(values, np.int32)
    except OverflowError:
        raise ValueError("token_ids holds an id beyond 32 bits") from None
