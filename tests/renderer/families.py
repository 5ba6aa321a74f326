"""Real families for tests: templates, vocabularies and golden renders of `../shared/data`.

Where a vocabulary is not at hand, a tokenizer of bytes and the template's own markers stands in for
it: texts are exact then, ids are not a model's.
"""

from __future__ import annotations

import importlib.util
import lzma
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import orjson
import pytest

from prorl.renderer import proof
from prorl.renderer.family import Family, find_family
from prorl.renderer.model import TemplateRenderer
from prorl.renderer.template import ChatTemplate
from prorl.tokenizer import ByteTokenizer, HFTokenizer
from prorl.types import Json, Message, ToolCall, ToolSpec

DATA = Path(__file__).parents[2] / "../shared/data"
TEMPLATES = DATA / "chat_templates"
needs_data = pytest.mark.skipif(
    not TEMPLATES.exists(), reason=f"{TEMPLATES}: the families' templates are not here"
)
TODAY = date(2026, 11, 22)
"""Of the golden renders."""
_MARKERS = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,60}｜>|\[/?[A-Z]+(?:_[A-Z]+)*\]|</?s>|\[e~\[|\]~b\]|\]~!b\["
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|start_of_turn|end_of_turn)>"
    r"|</?minimax:tool_call>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
)
_MISTRAL_V11 = {
    "<SPECIAL_32>": "[ARGS]",
    "<SPECIAL_33>": "[CALL_ID]",
    "<SPECIAL_34>": "[THINK]",
    "<SPECIAL_35>": "[/THINK]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One template in one mode, and what random conversations with it look like."""

    template: str
    vocabulary: str = ""
    variables: Mapping[str, Json] = field(default_factory=dict)
    think: bool = False
    parallel: bool = True
    content_with_calls: bool = True
    """Text beside calls."""
    system: bool | None = None
    tools: bool = True
    call_id: str = "call_{index}"
    plain_keys: bool = False
    """Keys of objects are words: the format writes them bare (Gemma 4)."""
    most_calls: int = 3
    """In a turn whose calls come back: the template closes a longer one twice (DeepSeek V3)."""

    @property
    def name(self) -> str:
        switches = ",".join(f"{key}={value}" for key, value in self.variables.items())
        return self.template + (f"[{switches}]" if switches else "")


OFF: Mapping[str, Json] = {"enable_thinking": False}
ON: Mapping[str, Json] = {"enable_thinking": True}
_KIMI, _NINE = "functions.{name}:{index}", "c{index:08d}"
MODELS = (
    Model(template="qwen2.5", vocabulary="qwen3"),
    Model(template="qwen3", vocabulary="qwen3", think=True),
    Model(template="qwen3", vocabulary="qwen3", variables=OFF),
    Model(template="qwen3-2025-04", vocabulary="qwen3", think=True),
    Model(template="qwen3-instruct-2507", vocabulary="qwen3"),
    Model(template="qwen3-coder", vocabulary="qwen3"),
    Model(template="glm-4.5", vocabulary="glm-4.5", think=True),
    Model(template="glm-4.5", vocabulary="glm-4.5", variables=OFF),
    Model(template="glm-4.6", vocabulary="glm-4.5", think=True),
    Model(template="deepseek-v3", vocabulary="deepseek-v3", content_with_calls=False, most_calls=2),
    Model(template="deepseek-r1", vocabulary="deepseek-v3", think=True, content_with_calls=False),
    Model(template="kimi-k2", vocabulary="kimi-k2", call_id=_KIMI),
    Model(
        template="gpt-oss",
        vocabulary="gpt-oss",
        think=True,
        parallel=False,
        content_with_calls=False,
    ),
    Model(
        template="mistral-nemo-2407",
        vocabulary="mistral-tekken",
        call_id=_NINE,
        content_with_calls=False,
    ),
    Model(
        template="mistral-small-3.2",
        vocabulary="mistral-tekken",
        call_id=_NINE,
        content_with_calls=False,
    ),
    Model(template="devstral-small-2507", vocabulary="mistral-tekken", call_id=_NINE),
    Model(template="ministral-3-reasoning", vocabulary="mistral-tekken", call_id=_NINE),
    Model(template="phi-4", vocabulary="phi-4", tools=False),
    Model(template="deepseek-v3.1"),
    Model(template="glm-4.7-flash", think=True),
    Model(template="llama-3.1", parallel=False, content_with_calls=False),
    Model(template="llama-3.2", parallel=False, content_with_calls=False),
    Model(template="llama-3.3", parallel=False, content_with_calls=False),
    Model(template="gemma-4", variables=ON, content_with_calls=False, plain_keys=True),
    Model(template="gemma-3", tools=False),
    Model(template="granite-3.3"),
    Model(template="granite-4.0"),
    Model(template="granite-4.1"),
    Model(template="minimax-m2", think=True),
    Model(template="nemotron-3-nano", think=True),
    Model(template="qwen3.5", think=True),
    Model(template="qwen3.6", think=True),
    Model(template="qwen3.8", think=True),
    Model(template="phi-4-mini", tools=False),
    Model(template="phi-3.5-mini", tools=False),
)


class Words(ByteTokenizer):
    def __init__(self, markers: list[str]) -> None:
        super().__init__()
        self.specials = {text: 256 + index for index, text in enumerate(markers)}
        self.vocab_size = 256 + len(markers)
        self._special_text = {id: text for text, id in self.specials.items()}


@cache
def goldens() -> Mapping[str, list[dict[str, Any]]]:
    rows_by_template = defaultdict(list)
    with lzma.open(TEMPLATES / "goldens.jsonl.xz") as file:
        for line in file:
            row = orjson.loads(line)
            rows_by_template[row["template"].removesuffix(".jinja")].append(row)
    return rows_by_template


@cache
def vocabulary(name: str) -> HFTokenizer:
    """A real vocabulary, unpacked into a folder of its own."""
    folder = Path(mkdtemp(prefix="prorl-vocabulary-"))
    data = orjson.loads(
        lzma.decompress((DATA / "tokenizers" / name / "tokenizer.json.xz").read_bytes())
    )
    if name == "mistral-tekken":  # its specials lack a place in the vocabulary; v11's have no names
        for token in data["added_tokens"]:
            token["content"] = _MISTRAL_V11.get(token["content"], token["content"])
            data["model"]["vocab"].setdefault(token["content"], token["id"])
    (folder / "tokenizer.json").write_bytes(orjson.dumps(data))
    tokenizer = HFTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    folder.rmdir()
    return tokenizer


def source(model: Model) -> str:
    return (TEMPLATES / f"{model.template}.jinja").read_text()


def template(model: Model, variables: Mapping[str, Json]) -> ChatTemplate:
    """With the variables of its golden renders, which hold its special tokens."""
    return ChatTemplate(source(model), TODAY, variables, model.name)


def variables(model: Model) -> dict[str, Json]:
    return {**goldens()[model.template][0]["variables"], **model.variables}


_made: dict[str, TemplateRenderer] = {}


def renderer(model: Model) -> TemplateRenderer:
    """Made and proved once."""
    key = f"{model.name} {model.vocabulary}"
    if key not in _made:
        family = find_family(source(model), "", model.name)
        tokenizer = (
            vocabulary(model.vocabulary) if model.vocabulary else Words(_markers(model, family))
        )
        made = TemplateRenderer(
            tokenizer, template(model, variables(model)), family, allow_unrendered_tools=True
        )
        made.proof = proof.check(made, model.name)
        _made[key] = made
    return _made[key]


def _markers(model: Model, family: Family) -> list[str]:
    thoughts = [marker.split("\n")[0] for marker in family.thoughts or ()]
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "end")]
    values = [value for value in variables(model).values() if str(value).startswith(("<", "["))]
    markers = _MARKERS.findall(source(model))
    return sorted({*markers, *family.stops, *family.markers, *thoughts, *roles, *values})


def message(values: Mapping[str, Any]) -> Message:
    calls = tuple(
        ToolCall(
            call["function"]["name"],
            orjson.loads(arguments)
            if isinstance(arguments := call["function"]["arguments"], str)
            else arguments,
            id=call["id"],
        )
        for call in values.get("tool_calls") or ()
    )
    return Message(
        role=values["role"],
        content=values["content"] or "",
        tool_calls=calls,
        reasoning=values.get("reasoning_content", ""),
        name=values.get("name", ""),
        call_id=values.get("tool_call_id", ""),
    )


def specs(values: list[dict[str, Any]] | None) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec(**value["function"]) for value in values or ())


@cache
def conversations() -> ModuleType:
    """The seeded generator that lies beside the templates."""
    where = TEMPLATES / "random_conversations.py"
    spec = importlib.util.spec_from_file_location("random_conversations", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
