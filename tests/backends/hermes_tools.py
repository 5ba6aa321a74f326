"""A model whose template has no tools, with one that has: calls and results in Hermes' form, as
Qwen2.5 and Qwen3 have it. Unused special tokens of the vocabulary become the markers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

MARKERS = {
    "<jupyter_start>": "<tool_call>",
    "<jupyter_text>": "</tool_call>",
    "<jupyter_code>": "<tool_response>",
    "<jupyter_output>": "</tool_response>",
}
"""SmolLM2's unused special tokens, and what they are called from here on."""

TEMPLATE = """\
{%- macro turn(role, text) %}
{{- '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
{%- endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools %}
{%- set listed %}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}{% endset %}
{%- set system %}
{{- system ~ ('\\n\\n' if system else '') ~ 'You may call these functions:\\n<tools>' ~ listed }}
{{- '\\n</tools>\\nTo call one, write\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n' }}
{{- '</tool_call>' }}
{%- endset %}
{%- endif %}
{%- if system %}{{ turn('system', system) }}{% endif %}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '\\n' if not loop.first or message.content }}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ turn(message.role, message.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def with_tools(model: Path, out: Path) -> Path:
    """A directory of the same weights whose template shows tools; `out`."""
    out.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (out / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, out / file.name)
    text = (out / "tokenizer.json").read_text()
    for old, new in MARKERS.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    tokenizer = orjson.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] not in MARKERS.values()
    (out / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out
