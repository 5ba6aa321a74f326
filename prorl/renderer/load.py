"""From a model's directory to its renderer: the one factory.

    make_renderer(RendererSpec(model="Qwen3-4B", variables={"enable_thinking": False}))

| directory | renderer |
|---|---|
| `bytes` | ChatML over bytes |
| tokenizer_config.json with `prorl_compact_tools` (toy models) | ChatML |
| tokenizer.json and a chat template | the template, proved |
| `name` is an entry point of the group `prorl.renderers` | `factory(spec)` gives it |

Whatever cannot be read or proved raises ConfigError here, before a first rollout.
"""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from prorl import plugins
from prorl.config.renderer import RendererSpec
from prorl.errors import ConfigError
from prorl.renderer.chatml import ChatMLRenderer
from prorl.tokenizer import HFTokenizer, load_tokenizer, max_token_bytes
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.protocols import Renderer
    from prorl.renderer.template import ChatTemplate, Checkpoint

ENTRY_POINTS = "prorl.renderers"
CHATML, TEMPLATE = "chatml", "template"


def is_ours(spec: RendererSpec) -> bool:
    return spec.name in ("", CHATML, TEMPLATE)


def make_renderer(spec: RendererSpec) -> Renderer:
    """The renderer of a run. Raises ConfigError with what is missing."""
    if not is_ours(spec):
        renderer: Renderer = plugins.make(ENTRY_POINTS, spec.name, ConfigError, {}, spec)
        return renderer
    tokenizer = load_tokenizer(spec.model or "bytes")
    is_toy = not isinstance(tokenizer, HFTokenizer) or tokenizer.compact_tools
    if spec.name == CHATML or (not spec.name and is_toy):
        if spec.variables:
            raise ConfigError(
                f"renderer.variables {', '.join(spec.variables)} for the built-in ChatML",
                "a model's directory with a chat template, which reads them",
                "leave them out",
            )
        return ChatMLRenderer(tokenizer)
    if not isinstance(tokenizer, HFTokenizer):
        raise ConfigError(
            "renderer.name `template` without a model's directory",
            "a directory with tokenizer.json and a chat template",
            "set run.model to it",
        )
    return template_renderer(spec, tokenizer)


def template_renderer(spec: RendererSpec, tokenizer: HFTokenizer) -> Renderer:
    """A `TemplateRenderer`, proved. Raises ConfigError."""
    try:
        import jinja2  # noqa: F401
    except ImportError as cause:
        raise ConfigError(
            f"{spec.model} speaks by a chat template",
            "the package jinja2",
            "install prorl's extra `render`",
        ) from cause
    from prorl.renderer import proof
    from prorl.renderer.family import find_family
    from prorl.renderer.model import TemplateRenderer
    from prorl.renderer.template import read_checkpoint

    checkpoint = read_checkpoint(Path(spec.model))
    # A tokenizer with more ids than the model has rows is another model's.
    if checkpoint.vocab_size and tokenizer.num_ids > checkpoint.vocab_size:
        raise ConfigError(
            f"{checkpoint.directory}: tokenizer.json has {tokenizer.num_ids} ids, config.json says"
            f" vocab_size {checkpoint.vocab_size}",
            "the tokenizer of this model",
            "fetch tokenizer.json from the model's repository",
        )
    template, tool_template = _templates(spec, checkpoint)
    # the tokenizer's own end: model servers stop there, asked or not
    eos = tokenizer.specials.get(checkpoint.special_tokens.get("eos_token", ""))
    renderer = TemplateRenderer(
        tokenizer,
        template,
        find_family((tool_template or template).source, spec.family, template.where),
        tool_template=tool_template,
        stop_ids=[*checkpoint.stop_ids, *([] if eos is None else [eos])],
        on_history_rewrite=spec.on_history_rewrite,
        allow_unrendered_tools=spec.allow_unrendered_tools,
    )
    renderer.proof = proof.check(renderer, spec.model)
    return renderer


def _templates(
    spec: RendererSpec, checkpoint: Checkpoint
) -> tuple[ChatTemplate, ChatTemplate | None]:
    from prorl.renderer.template import ChatTemplate

    source, tool_source = checkpoint.template, checkpoint.tool_template
    if not source and not tool_source:
        raise ConfigError(
            f"{spec.model} has no chat template",
            "chat_template.jinja, or chat_template in tokenizer_config.json",
            "take an instruct model's directory, or set renderer.name to chatml",
        )
    variables: dict[str, Json] = {**checkpoint.special_tokens, **spec.variables}
    where, today = f"{spec.model}: chat template", _day(spec.date)
    template = ChatTemplate(source or tool_source, today, variables, where)
    template.check(list(spec.variables))
    tools = ChatTemplate(tool_source, today, variables, where) if tool_source else None
    return template, tools


def _day(text: str) -> date:
    if not text:
        return datetime.now(UTC).date()
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"renderer.date {text!r}", "a day as YYYY-MM-DD") from None


SAMPLE = "def f(x):\n    return 24 * x  # café"
"""A text whose ids tell vocabularies apart: a model server is asked for them when a run begins."""


def describe(renderer: Renderer, spec: RendererSpec) -> dict[str, Json]:
    """Returns the facts of a renderer for a run's manifest: hashes, family, what was proved."""
    facts: dict[str, Json] = {"renderer": type(renderer).__name__, "model": spec.model}
    tokenizer_json = Path(spec.model) / "tokenizer.json"
    if tokenizer_json.is_file():
        facts["tokenizer_sha256"] = sha256(tokenizer_json.read_bytes()).hexdigest()
    # This module needs jinja2 of the extra `render`: while it is not loaded, no renderer is its.
    templates = sys.modules.get("prorl.renderer.model")
    if templates is not None and isinstance(renderer, templates.TemplateRenderer):
        facts |= renderer.facts()
    return facts | {
        "vocab_size": renderer.vocab_size,
        "max_token_bytes": max_token_bytes(renderer),
        "stop_token_ids": list(renderer.stop_token_ids),
        "sample_ids": load_tokenizer(spec.model).encode(SAMPLE).tolist() if spec.model else [],
    }
