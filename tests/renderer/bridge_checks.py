"""Random tool conversations with a family, every bridge held against the template's own text."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from prorl.renderer.guard import bare
from prorl.renderer.model import TemplateRenderer
from prorl.renderer.template import tool_values
from prorl.tokenizer import HFTokenizer
from prorl.types import Json, Message, ToolCall, ToolSpec
from tests.renderer import families
from tests.renderer.families import Model

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(slots=True)
class Tally:
    prompts: int = 0
    prompts_equal: int = 0
    """First prompts whose ids are those of the official text."""
    results: int = 0
    results_exact: int = 0
    """Bridges over tool results that equal the template's own next prompt, text for text."""
    users: int = 0
    users_exact: int = 0
    tails_right: int = 0
    """Bridges that the template's own next prompt ends in."""
    ids_differ: int = 0
    """Exact bridges whose ids differ from those of the whole official text."""
    calls: int = 0
    calls_equal: int = 0
    """Calls that come back from what the template wrote of them."""


def conversation(model: Model, seed: int) -> tuple[list[Message], tuple[ToolSpec, ...]]:
    """A random conversation as this model can hold it; arguments fit the declared types."""
    rng = random.Random(seed)
    generator: Any = families.conversations()
    values, tools = generator.conversation(
        rng,
        system=model.system,
        parallel=model.parallel,
        think=model.think,
        tool_turns=4 if model.tools else 0,
        call_id=model.call_id,
    )
    specs = families.specs(tools) if model.tools else ()
    schemas = {spec.name: spec.parameters["properties"] for spec in specs}
    messages = [_fitting(model, families.message(value), schemas, rng) for value in values]
    return messages, specs


def _fitting(
    model: Model, message: Message, schemas: dict[str, Any], rng: random.Random
) -> Message:
    if not message.tool_calls:
        return message
    calls = tuple(
        call._replace(
            arguments={
                key: _value(model, rng, schemas[call.name][key]["type"]) for key in call.arguments
            }
        )
        for call in message.tool_calls
    )
    return Message(
        role="assistant",
        content=message.content if model.content_with_calls else "",
        tool_calls=calls,
        reasoning=message.reasoning,
    )


def _value(model: Model, rng: random.Random, kind: str) -> Json:
    generator: Any = families.conversations()
    kinds = TYPES[kind]
    while True:
        value: Json = generator.value(rng)
        is_word = isinstance(value, bool) and kind != "boolean"
        if (
            isinstance(value, kinds)
            and not is_word
            and not (model.plain_keys and _has_odd_key(value))
        ):
            return value


def _has_odd_key(value: Json) -> bool:
    if isinstance(value, list):
        return any(map(_has_odd_key, value))
    if not isinstance(value, dict):
        return False
    return any(not re.fullmatch(r"\w+", key) or _has_odd_key(value[key]) for key in value)


def turns(messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
    """Each assistant turn's index, and the messages up to the next one; [] behind the last."""
    for index, message in enumerate(messages):
        if message.role == "assistant":
            new: list[Message] = []
            for later in messages[index + 1 :]:
                if later.role == "assistant":
                    break
                new.append(later)
            yield index, new


def official(
    renderer: TemplateRenderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    prompt: bool,
) -> str:
    """Returns the text that the template writes, nothing of ours between."""
    return renderer.template.render(
        renderer.family.dialect.messages(messages),
        tool_values(tools) or None,
        add_generation_prompt=prompt,
    )


def check_conversations(model: Model, seeds: range) -> Tally:
    renderer, tally = families.renderer(model), Tally()
    for seed in seeds:
        messages, tools = conversation(model, seed)
        _check_conversation(model, renderer, messages, tools, tally)
    return tally


def _check_conversation(
    model: Model,
    renderer: TemplateRenderer,
    messages: Sequence[Message],
    tools: tuple[ToolSpec, ...],
    tally: Tally,
) -> None:
    first = next(index for index, _ in turns(messages))
    text = official(renderer, messages[:first], tools, prompt=True)
    ids = renderer.prompt(messages[:first], tools)
    tally.prompts += 1
    tally.prompts_equal += _same(renderer, ids, text)
    for index, new in turns(messages):
        if len(messages[index].tool_calls) <= model.most_calls:
            _check_call(renderer, messages[index], tools, tally)
        if new:
            _check_bridge(renderer, messages, tools, index, new, tally)


def _same(renderer: TemplateRenderer, ids: Any, text: str) -> bool:
    tokenizer = renderer.tokenizer
    if isinstance(tokenizer, HFTokenizer):
        return bool(np.array_equal(ids, tokenizer.encode_whole(text)))
    return tokenizer.decode(ids) == text


def _check_bridge(
    renderer: TemplateRenderer,
    messages: Sequence[Message],
    tools: tuple[ToolSpec, ...],
    index: int,
    new: list[Message],
    tally: Tally,
) -> None:
    before = official(renderer, messages[:index], tools, prompt=True)
    after = official(renderer, messages[: index + 1], tools, prompt=False)
    expected = official(renderer, [*messages[: index + 1], *new], tools, prompt=True)
    end, tail = renderer.tail(new)
    sampled_text = after[len(before) :] if after.startswith(before) else None
    if sampled_text is not None and not renderer.family.next_role_stops:
        last = renderer.last_end(sampled_text)
        sampled_text = sampled_text[:last] if last else sampled_text + end
    elif sampled_text is not None:
        sampled_text = sampled_text.removesuffix("\n")
    exact = sampled_text is not None and before + sampled_text + bare(tail) == expected
    tally.tails_right += expected.endswith(bare(tail))
    if new[0].role == "tool":
        tally.results += 1
        tally.results_exact += exact
    else:
        tally.users += 1
        tally.users_exact += exact
    if exact and sampled_text is not None:
        _check_ids(renderer, before, sampled_text, new, expected, tally)


def _check_ids(
    renderer: TemplateRenderer,
    before: str,
    sampled_text: str,
    new: list[Message],
    expected: str,
    tally: Tally,
) -> None:
    prompt, sampled = renderer.encode(before), renderer.encode(sampled_text)
    if renderer.family.next_role_stops:
        sampled = np.append(sampled, renderer.tokenizer.specials[renderer.tail(new)[0]])
        sampled = sampled.astype(np.int32)
    grown = np.concatenate([prompt, sampled, renderer.bridge(sampled, new)])
    np.testing.assert_array_equal(grown[: len(prompt)], prompt)
    np.testing.assert_array_equal(grown[len(prompt) : len(prompt) + len(sampled)], sampled)
    # A turn that begins with a blank is merged with the prompt's last newline when all is encoded
    # at once; sampled ids never are.
    tally.ids_differ += not sampled_text[:1].isspace() and not _same(renderer, grown, expected)


def _check_call(
    renderer: TemplateRenderer,
    message: Message,
    tools: tuple[ToolSpec, ...],
    tally: Tally,
) -> None:
    if not message.tool_calls or not renderer.family.shows_calls:
        return
    parsed_calls = renderer.parse(renderer.completion(message), None, tools).tool_calls
    tally.calls += len(message.tool_calls)
    if len(parsed_calls) == len(message.tool_calls):
        tally.calls_equal += sum(map(_equal, parsed_calls, message.tool_calls))


def _equal(parsed: ToolCall, written: ToolCall) -> bool:
    """Vocabularies of Qwen keep text in normal form C."""
    same = _composed(parsed.arguments) == _composed(written.arguments)
    return parsed.name == written.name and same and not parsed.error


def _composed(arguments: Json) -> Json:
    return orjson.loads(unicodedata.normalize("NFC", orjson.dumps(dict(arguments)).decode()))
