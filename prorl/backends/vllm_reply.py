"""A completion from what vLLM sends: one JSON object, or a stream of events.

The objects of a stream of server-sent events each bring a few tokens more.

Invariants: what makes no sense raises (KeyError, TypeError, ValueError), nothing is repaired; ids
and logprobs become arrays once for each part that is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import orjson

from prorl.backends.labels import version_of
from prorl.types import Completion, FinishReason, GenerateRequest, Json, PolicyVersion

if TYPE_CHECKING:
    from prorl.types import Float32, Int32

DONE = b"[DONE]"


class Reply:
    """One reply while it comes."""

    def __init__(self, request: GenerateRequest, backend: str) -> None:
        self._request, self._backend = request, backend
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._marks: list[tuple[int, str]] = []
        """(end, label), where the server states labels."""
        self._cached = self._handed_on = 0
        self.finish: FinishReason | None = None

    @property
    def states_labels(self) -> bool:
        """Whether the server says by itself which weights sampled."""
        return bool(self._marks) or not self._ids

    @property
    def has_news(self) -> bool:
        """Whether tokens came since the last part."""
        return len(self._ids) > self._handed_on

    def take(self, value: Json) -> None:
        """One object: the whole reply or a piece of it. Raises what a malformed one leads to."""
        if "error" in value:
            raise ValueError(f"an error in the stream: {str(value['error'])[:200]}")
        details = (value.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached = int(details.get("cached_tokens") or self._cached)
        choices = value["choices"]
        if not choices and "usage" in value:
            return  # the last piece of a stream
        (choice,) = choices
        self._tokens(choice)
        if choice.get("finish_reason") is not None:
            self.finish = FinishReason(choice["finish_reason"])

    def _tokens(self, choice: Json) -> None:
        ids, start = choice["token_ids"], len(self._ids)
        logprobs = (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise ValueError(f"token_ids {str(ids)[:80]}, token_logprobs {str(logprobs)[:80]}")
        self._ids += ids
        self._logprobs += logprobs
        for mark in choice.get("weight_versions") or ():
            self._marks.append((start + int(mark["end"]), str(mark["version"])))

    def part(self) -> Completion:
        """What came since the last part, as an aborted completion.

        Where nothing is stated its weights are unknown.
        """
        start, self._handed_on = self._handed_on, len(self._ids)
        return self._completion(start, FinishReason.ABORT, "")

    def completion(self, label: str | None, llm_s: float = 0.0) -> Completion:
        """All of it; `label` is that of tokens for which the reply states none."""
        if self.finish is None:
            raise ValueError("half a reply: it ended without a finish_reason")
        return self._completion(0, self.finish, label, llm_s)

    def _completion(
        self, start: int, finish: FinishReason, label: str | None, llm_s: float = 0.0
    ) -> Completion:
        ids = _array(self._ids[start:], "i", "token_ids").astype(np.int32, casting="same_kind")
        ends, versions = self._versions(start, label)
        return Completion(
            token_ids_C=ids,
            logprobs_C=_array(self._logprobs[start:], "fi", "token_logprobs").astype(np.float32),
            finish_reason=finish,
            version_ends=ends,
            versions=versions,
            cached_tokens=0 if start else self._cached,
            llm_s=llm_s,
            backend=self._backend,
        )

    def _versions(
        self, start: int, label: str | None
    ) -> tuple[tuple[int, ...], tuple[PolicyVersion, ...]]:
        count = len(self._ids)
        marks: list[tuple[int, str | None]] = [*self._marks] or [(count, label)]
        ends: list[int] = []
        versions: list[PolicyVersion] = []
        for end, stated in marks:
            if end <= start:
                continue
            version = version_of(stated, self._request)
            if versions and versions[-1] == version and end - start > ends[-1]:
                ends[-1] = end - start
            else:
                ends.append(end - start)
                versions.append(version)
        return tuple(ends), tuple(versions)


class Events:
    """Cuts a byte stream into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def feed(self, part: bytes) -> Iterator[Json]:
        """The objects that this part completes. Raises ValueError for what is no JSON."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == DONE:
                self.is_done = True
            else:
                yield orjson.loads(data)


def _array(values: list[Json], kinds: str, name: str) -> Int32 | Float32:
    """A JSON list of numbers as an array; null, text or nesting is refused."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in kinds and len(array)):
        raise ValueError(f"{name} is no list of numbers: {str(values)[:80]}")
    if len(array) and "f" not in kinds and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"{name} holds an id beyond 32 bits")
    return array if len(array) else array.astype(np.int32)
