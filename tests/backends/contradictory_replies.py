"""Replies that contradict the request or themselves: a plausible liar for every field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

from prorl.types import Json

Lie = Callable[[list[Json]], list[Json]]
"""The events of a right reply -> those of the lie; the last is the count alone."""


def _all(change: Callable[[Json], object]) -> Lie:
    def lie(events: list[Json]) -> list[Json]:
        for event in events:
            change(event)
        return events

    return lie


def _choices(change: Callable[[Json], object]) -> Lie:
    return _all(lambda event: [change(choice) for choice in event["choices"]])


def _last(change: Callable[[Json], object]) -> Lie:
    def lie(events: list[Json]) -> list[Json]:
        change(events[-2]["choices"][0])
        return events

    return lie


def _counts(name: str, by: int) -> Lie:
    def lie(events: list[Json]) -> list[Json]:
        for event in events:
            if event.get("usage"):
                event["usage"][name] += by
        return events

    return lie


def _behind_the_stop(events: list[Json]) -> list[Json]:
    choice = events[-2]["choices"][0]
    choice["token_ids"].append(65)
    choice["logprobs"]["token_logprobs"].append(-0.5)
    for event in events[-2:]:
        if event.get("usage"):
            event["usage"]["completion_tokens"] += 1
            event["usage"]["total_tokens"] += 1
    return events


def _behind_the_end(events: list[Json]) -> list[Json]:
    extra = deepcopy(events[-2])
    extra["choices"][0]["finish_reason"] = None
    return [*events, "[DONE]", extra]


def _cut(events: list[Json]) -> list[Json]:
    """A reply that ends early and says that it is whole."""
    kept = events[: len(events) // 2]
    kept[-1]["choices"][0]["finish_reason"] = "stop"
    count = sum(len(event["choices"][0]["token_ids"]) for event in kept)
    last = events[-1]
    last["usage"]["completion_tokens"] = count
    last["usage"]["total_tokens"] = last["usage"]["prompt_tokens"] + count
    return [*kept, last]


def _text_of(name: str, value: Json) -> Callable[[Json], None]:
    def change(place: Json) -> None:
        place[name] = value

    return change


def _first(change: Callable[..., object], *values: Json) -> Lie:
    def lie(events: list[Json]) -> list[Json]:
        change(events[0]["choices"][0], *values)
        return events

    return lie


def _first_logprob(value: Json) -> Lie:
    return _first(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, value))


def _usage(name: str, value: Json) -> Lie:
    return lambda events: [
        *events[:-1],
        events[-1] | {"usage": events[-1]["usage"] | {name: value}},
    ]


def _fewer(choice: Json, name: str) -> None:
    choice["logprobs"][name].pop()


def _named(choice: Json, ids: Callable[[list[int]], list[int]], by: float = 0.0) -> None:
    """Each token told twice, as vLLM does, and once otherwise."""
    logprobs = choice["logprobs"]["token_logprobs"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    choice["logprobs"]["tokens"] = names
    choice["logprobs"]["top_logprobs"] = [
        {name: value + by} for name, value in zip(names, logprobs, strict=True)
    ]
    choice["token_ids"] = ids(choice["token_ids"])


def _replaced_all(choice: Json, name: str, value: Json) -> None:
    choice[name] = value


def _replaced(choice: Json, name: str, first: Json) -> None:
    choice[name][0] = first


def _with_logprobs(choice: Json, name: str, value: Json) -> None:
    choice["logprobs"][name] = value


LIES: Mapping[str, Lie] = {
    "another request's id": _all(_text_of("id", "cmpl-r/1/1/0x")),
    "one event of another request": lambda events: [events[0] | {"id": "cmpl-x"}, *events[1:]],
    "no id": _all(lambda event: event.pop("id")),
    "another model": _all(_text_of("model", "other")),
    "another choice": _choices(_text_of("index", 1)),
    "two choices": lambda events: [
        events[0] | {"choices": events[0]["choices"] * 2},
        *events[1:],
    ],
    "the first event lost": lambda events: events[1:],
    "an event lost": lambda events: [*events[:1], *events[2:]],
    "an event twice": lambda events: [events[0], *events],
    "two events swapped": lambda events: [events[1], events[0], *events[2:]],
    "an event behind the end": _behind_the_end,
    "an event behind the last": lambda events: [*events[:-1], events[0], events[-1]],
    "tokens behind the stop": _behind_the_stop,
    "cut and called whole": _cut,
    "ended by length": _last(_text_of("finish_reason", "length")),
    "ended by another token": _last(_text_of("stop_reason", 65)),
    "ended by a text": _last(_text_of("stop_reason", "</s>")),
    "as many texts as it likes": _first(_with_logprobs, "tokens", ["x"]),
    "fewer likely tokens than tokens": _first(_with_logprobs, "top_logprobs", [{"x": -0.1}]),
    "ids that change places": _first(_named, lambda ids: ids[::-1]),
    "the logprob of another token": _first(_named, lambda ids: ids, -3.5),
    "weights of some of its tokens": _last(
        _text_of("weight_versions", [{"version": "0", "start": 0, "end": 1}])
    ),
    "weights from a later token on": _first(
        _replaced_all, "weight_versions", [{"version": "0", "start": 1, "end": 4}]
    ),
    "no reason for the end": _last(_text_of("finish_reason", None)),
    "a prompt cut by one": _counts("prompt_tokens", -1),
    "a prompt of another": lambda events: _choices(_text_of("prompt_token_ids", [1, 2, 3]))(events),
    "a token more by its count": _counts("completion_tokens", 1),
    "a sum that is none": _counts("total_tokens", 5),
    "no count": lambda events: [event | {"usage": None} for event in events[:-1]],
    "more cached than asked": lambda events: [
        *events[:-1],
        events[-1]
        | {"usage": events[-1]["usage"] | {"prompt_tokens_details": {"cached_tokens": 10**6}}},
    ],
    "a logprob below float32": _first_logprob(-3e38),
    "a logprob that hides nothing": _first_logprob(-9999.0),
    "a logprob above 0": _first_logprob(0.01),
    "a logprob that is null": _first_logprob(None),
    "a logprob that is true": _first_logprob(True),
    "an id that is true": _first(_replaced, "token_ids", True),
    "an id that is text": _first(_replaced, "token_ids", "65"),
    "an id of no vocabulary": _first(_replaced, "token_ids", 1 << 20),
    "an id below 0": _first(_replaced, "token_ids", -1),
    "an id that is a fraction": _first(_replaced, "token_ids", 65.5),
    "a logprob that is text": _first_logprob("-0.5"),
    "a logprob too few": _first(_fewer, "token_logprobs"),
    "ended by an abort": _last(_text_of("finish_reason", "abort")),
    "ended as no engine ends": _last(_text_of("finish_reason", "tool_calls")),
    "a count that is text": _usage("completion_tokens", "9"),
    "a count that is true": _usage("completion_tokens", True),
    "a prompt of a fraction": _usage("prompt_tokens", 3.5),
    "fewer cached than none": lambda events: [
        *events[:-1],
        events[-1]
        | {"usage": events[-1]["usage"] | {"prompt_tokens_details": {"cached_tokens": -1}}},
    ],
    "a piece without a choice": lambda events: [
        events[0] | {"choices": [], "usage": None},
        *events[1:],
    ],
    "an error between": lambda events: [events[0], events[1] | {"error": {"code": 500}}],
}
