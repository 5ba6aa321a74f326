"""How families write calls: one function each, from a turn's text to content and calls.

| grammar | families |
|---|---|
| hermes | Qwen 2.5, Qwen 3, Granite 4, Hermes 3 |
| xml | Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 |
| invoke | MiniMax M2 |
| glm | GLM 4.5 and later |
| deepseek | DeepSeek V3, R1, V3.1 |
| bracket | Mistral |
| listed | Granite 3.3, Phi-4-mini |
| section | Kimi K2 |
| harmony | gpt-oss |
| bare_json | Llama 3 |
| gemma | Gemma 4 |
| plain | models without calls |
"""

from __future__ import annotations

from prorl.renderer.grammar.common import Grammar as Grammar
from prorl.renderer.grammar.common import Said as Said
from prorl.renderer.grammar.common import Tools as Tools
from prorl.renderer.grammar.common import clean
from prorl.renderer.grammar.gemma import gemma as gemma
from prorl.renderer.grammar.harmony import harmony as harmony
from prorl.renderer.grammar.marked import bare_json as bare_json
from prorl.renderer.grammar.marked import bracket as bracket
from prorl.renderer.grammar.marked import deepseek as deepseek
from prorl.renderer.grammar.marked import listed as listed
from prorl.renderer.grammar.marked import section as section
from prorl.renderer.grammar.tagged import glm as glm
from prorl.renderer.grammar.tagged import hermes as hermes
from prorl.renderer.grammar.tagged import invoke as invoke
from prorl.renderer.grammar.tagged import xml as xml


def plain(text: str, tools: Tools, ended: bool) -> Said:
    """Read a completion of a family without calls: everything is content."""
    return Said(clean(text))
