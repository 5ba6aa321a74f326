"""A small model directory of our own: bytes, a chat template that drops thoughts."""

from __future__ import annotations

from pathlib import Path

import orjson
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from prorl.tokenizer import SPECIALS
from prorl.types import ToolSpec

TEMPLATE = """\
{%- if tools %}
<|im_start|>system
{{ messages[0].content ~ '\n\n' if messages[0].role == 'system' }}Tools, one a line:
{%- for tool in tools %}
{{ '\n' ~ tool.function | tojson }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls %}
{{- '\n' if m.content or not loop.first }}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""

LOOK = ToolSpec(
    "look",
    "Looks up.",
    {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}},
)


def write_model(
    directory: Path, template: str = TEMPLATE, specials: tuple[str, ...] = SPECIALS
) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json, config.json and the template."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=_bytes(), merges=[("a", "s"), ("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    (directory / "config.json").write_bytes(orjson.dumps({"vocab_size": 512}))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def _bytes() -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {letter: index for index, letter in enumerate([*letters, "as", "ĊĊ"])}
