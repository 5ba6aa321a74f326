"""The table of families: what cannot be read off a chat template by rendering it.

A family is found by what its template writes (`signs`), the first that fits; a template that fits
none is refused unless the run names one. What a template does say is not repeated here: frames,
default system prompts, where tools stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prorl.errors import ConfigError
from prorl.renderer import grammar
from prorl.renderer.grammar import Grammar
from prorl.renderer.template import TemplateDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The way in which a family of models writes calls and thoughts, and ends its turns."""

    name: str
    signs: tuple[str, ...]
    """Texts that all stand in its template."""
    grammar: Grammar
    markers: tuple[str, ...]
    """The markers that its grammar looks for; those that are added tokens are only read as
    tokens.
    """
    stops: tuple[str, ...]
    """Tokens that end a turn, most usual first."""
    thoughts: tuple[str, str] | None = ("<think>", "</think>")
    """Tokens around thoughts; None where the grammar finds them itself or there are none."""
    next_role_stops: bool = False
    """The model stops with the first token of the next message (GLM, Gemma 4 after a call)."""
    fewest_calls: int = 1
    """A dummy turn needs that many calls for the template to close them (DeepSeek V3 and R1)."""
    dialect: TemplateDialect = field(default_factory=TemplateDialect)
    closers: tuple[str, ...] = ()
    """Tokens that end a turn in history, besides `stops` (gpt-oss writes `<|end|>` for
    `<|return|>`).
    """
    any_end_closes: bool = False
    """Whichever end was sampled, the next message follows at once."""
    shows_calls: bool = True
    """The template writes an earlier turn's calls."""
    refused: str = ""
    """The reason why a model of this family cannot be rendered from its template."""
    call_end: str = ""
    """The text that ends a turn with calls, where the template does not write it as such."""
    answer_end: str = ""
    """The text that ends a turn without calls, where the template does not write it as such."""


_CHATML = ("<|im_end|>", "<|endoftext|>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DEEPSEEK_STOPS = ("<｜end▁of▁sentence｜>",)
_AS_TEXT = TemplateDialect(arguments_as_text=True, silent_calls=True)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="gpt-oss",
        signs=("<|channel|>", "<|return|>"),
        grammar=grammar.harmony,
        markers=(
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        stops=("<|return|>", "<|call|>"),
        closers=("<|end|>",),
        any_end_closes=True,
        thoughts=None,
        dialect=TemplateDialect(reasoning_key="thinking"),
    ),
    Family(
        name="gemma-4",
        signs=("<|tool_call>", "<|turn>"),
        grammar=grammar.gemma,
        markers=("<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'),
        stops=("<turn|>", "<|tool_response>"),
        thoughts=("<|channel>thought\n", "<channel|>"),
    ),
    Family(
        name="kimi-k2",
        signs=("<|tool_calls_section_begin|>",),
        grammar=grammar.section,
        markers=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        stops=("<|im_end|>", "[EOS]"),
    ),
    Family(
        name="deepseek-v3.2",
        signs=("｜DSML｜",),
        grammar=grammar.plain,
        markers=(),
        stops=_DEEPSEEK_STOPS,
        refused=(
            "its prompts come from a Python encoder, and the templates made from it contradict"
            " themselves"
        ),
    ),
    Family(
        name="deepseek-v3",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        grammar=grammar.deepseek,
        markers=_DEEPSEEK,
        stops=_DEEPSEEK_STOPS,
        fewest_calls=2,
        dialect=_AS_TEXT,
        call_end="<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    Family(
        name="deepseek-v3.1",
        signs=("<｜tool▁calls▁begin｜>",),
        grammar=grammar.deepseek,
        markers=_DEEPSEEK,
        stops=_DEEPSEEK_STOPS,
    ),
    Family(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        grammar=grammar.bracket,
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        stops=("</s>",),
        thoughts=("[THINK]", "[/THINK]"),
    ),
    Family(
        name="minimax",
        signs=("<minimax:tool_call>",),
        grammar=grammar.invoke,
        markers=("<minimax:tool_call>", "</minimax:tool_call>"),
        stops=("[e~[",),
    ),
    Family(
        name="glm",
        signs=("<arg_key>", "<|observation|>"),
        grammar=grammar.glm,
        markers=(*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        next_role_stops=True,
        call_end="<|observation|>",
        answer_end="<|user|>",
    ),
    Family(
        name="llama-3",
        signs=("<|start_header_id|>", '"parameters": '),
        grammar=grammar.bare_json,
        markers=("<|python_tag|>",),
        stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        any_end_closes=True,
    ),
    Family(
        name="xml",
        signs=("<tool_call>", "<function="),
        grammar=grammar.xml,
        markers=_TOOL_CALL,
        stops=_CHATML,
    ),
    Family(
        name="granite-4",
        signs=("<|start_of_role|>", "<tool_call>"),
        grammar=grammar.hermes,
        markers=_TOOL_CALL,
        stops=("<|end_of_text|>",),
    ),
    Family(
        name="granite-3",
        signs=("<|start_of_role|>", "<|tool_call|>"),
        grammar=grammar.listed,
        markers=("<|tool_call|>",),
        stops=("<|end_of_text|>",),
        shows_calls=False,
    ),
    Family(
        name="hermes",
        signs=("<|im_start|>", "<tool_call>"),
        grammar=grammar.hermes,
        markers=_TOOL_CALL,
        stops=_CHATML,
    ),
    Family(
        name="phi-4-mini",
        signs=("<|end|>", "<|tool|>"),
        grammar=grammar.listed,
        markers=("<|tool_call|>", "<|/tool_call|>"),
        stops=("<|end|>", "<|endoftext|>"),
        shows_calls=False,
    ),
    Family(
        name="phi-3",
        signs=("<|end|>", "<|user|>"),
        grammar=grammar.plain,
        markers=(),
        stops=("<|end|>", "<|endoftext|>"),
    ),
    Family(
        name="gemma",
        signs=("<start_of_turn>", "<end_of_turn>"),
        grammar=grammar.plain,
        markers=(),
        stops=("<end_of_turn>", "<eos>"),
        thoughts=None,
    ),
    Family(
        name="deepseek-distill",
        signs=("<｜Assistant｜>",),
        grammar=grammar.plain,
        markers=(),
        stops=_DEEPSEEK_STOPS,
    ),
    Family(
        name="chatml",
        signs=("<|im_start|>",),
        grammar=grammar.plain,
        markers=(),
        stops=_CHATML,
    ),
)

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}


def find_family(template: str, name: str, where: str) -> Family:
    """The family of a template, or the named one. Raises ConfigError."""
    if name:
        if name not in BY_NAME:
            raise ConfigError(f"unknown model family {name!r}", f"one of {', '.join(BY_NAME)}")
        return BY_NAME[name]
    for family in FAMILIES:
        if all(sign in template for sign in family.signs):
            if family.refused:
                raise ConfigError(
                    f"{where} is of family {family.name}, which is not supported: {family.refused}",
                    "a family that its chat template describes",
                    "register a renderer of your own (entry point group prorl.renderers)",
                )
            return family
    raise ConfigError(
        f"{where} is of no known family",
        f"one of {', '.join(BY_NAME)}",
        "name the one it speaks like with renderer.family, or register a renderer of your own",
    )
