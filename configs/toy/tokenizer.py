"""The toy checkpoint's tokenizer: bytes, one token per digit and per operator.

And few merges, learned from the demonstrations.

Invariants: `len(tokenizer) == vocab_size` of the model; digits and operators never merge, so that
copying a number is copying its tokens; the head and the tail of a tool call are one token each. The
directory is read by `prorl.tokenizer`, transformers and vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from prorl.tokenizer import SPECIALS, ByteTokenizer

if TYPE_CHECKING:
    from prorl.types import Int32

VOCAB_SIZE = 576
END, PAD = "<|im_end|>", "<|endoftext|>"
_PIECES = "|".join(
    (
        r'\n\{"name":"[a-z]+","arguments":\{"[a-z]+":"',  # head of a call
        r'"\}\}\n',  # and its tail
        r"(?:assistant|user|system)\n",
        r"[0-9]",
        r"[+\-*/%()]",
        r" ?[A-Za-z]+",
        r"\n",
        r"[^A-Za-z0-9+\-*/%()\n]+?",
    )
)
CHAT_TEMPLATE = (
    "{%- if messages and messages[0].role == 'system' %}{{- '<|im_start|>system\\n' +"
    " messages[0].content }}{%- if tools %}{{- '\\ntools: ' }}{%- for tool in tools %}{{-"
    " tool.function.name + '(' + (tool.function.parameters.properties | list | join(', ')) + ')' +"
    " ('' if loop.last else ', ') }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%-"
    " for message in messages %}{%- if message.role == 'tool' %}{{-"
    " '<|im_start|>user\\n<tool_response>\\n' + message.content +"
    " '\\n</tool_response><|im_end|>\\n' }}{%- elif message.role != 'system' %}{{- '<|im_start|>' +"
    " message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if"
    " add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class TextRecorder(ByteTokenizer):
    """A tokenizer that keeps what the renderer asked it to encode.

    That is the text that a vocabulary is learned from.
    """

    compact_tools = True

    def __init__(self) -> None:
        super().__init__()
        self.texts: Counter[str] = Counter()

    def encode(self, text: str) -> Int32:
        """Encode a text as bytes, and count it."""
        self.texts[text] += 1
        return super().encode(text)


def train(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most `VOCAB_SIZE` tokens, specials included, from these texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "prorl_compact_tools": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_bytes(
        orjson.dumps(config, option=orjson.OPT_INDENT_2)
    )
