"""The toy checkpoint's tokenizer: bytes, one token per digit and per operator.

And few merges, learned from the demonstrations.

Invariants: `len(tokenizer) == vocab_size` of the model; digits and operators never merge, so that
copying a number is copying its tokens; the head and the tail of a tool call are one token each. The
directory is read by `prorl.tokenizer`, transformers and vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from prorl.tokenizer import SPECIALS, ByteTokenizer

if TYPE_CHECKING:
    from prorl.types import Int32

VOCAB_SIZE, GROWN_SIZE = 576, 800
END, PAD = "<|im_end|>", "<|endoftext|>"
_PIECES = "|".join(
    (
        # head of a call, and what is between two of its arguments
        r'\n\{"name":"[a-z]+","arguments":\{"(?:command":"str_replace","path|[a-z]+)":"',
        r'","[a-z_]+":"',
        r'"\}\}\n',  # and its tail
        r"\([a-z](?:,[a-z])?\): return ",  # between a function's name and its value
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


def grow(directory: Path, texts: Mapping[str, int], size: int) -> None:
    """Learn merges for these texts on top of a saved tokenizer's, until it has `size` ids.

    Ids that exist stay, and so does how any text without a new merge is encoded.
    """
    path = directory / "tokenizer.json"
    known = tokenizers.Tokenizer.from_file(str(path))
    pieces: Counter[tuple[str, ...]] = Counter()
    for text, count in texts.items():
        for piece, _ in known.pre_tokenizer.pre_tokenize_str(text):
            tokens = [token.value for token in known.model.tokenize(piece)]
            pieces[tuple(tokens)] += count
    data = orjson.loads(path.read_bytes())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    # ids behind the specials' are read as theirs unless these stand in the vocabulary, too
    vocab.update({token["content"]: token["id"] for token in data["added_tokens"]})
    next_id = known.get_vocab_size()
    while next_id < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, count in pieces.items():
            for pair in pairwise(piece):
                pairs[pair] += count
        if not pairs:
            break
        pair = min(pairs, key=lambda one: (-pairs[one], one))
        merges.append(list(pair))
        vocab["".join(pair)] = next_id
        next_id += 1
        merged: Counter[tuple[str, ...]] = Counter()
        for piece, count in pieces.items():
            merged[_merge(piece, pair)] += count
        pieces = merged
    path.write_bytes(orjson.dumps(data))


def _merge(piece: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for token in piece:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return tuple(out)


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
