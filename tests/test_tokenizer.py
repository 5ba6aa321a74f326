"""Tokenizers: text round-trips, and no text ever yields a special id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl.errors import ConfigError
from prorl.tokenizer import SPECIALS, ByteTokenizer, HFTokenizer, load_tokenizer

texts = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(SPECIALS),
        st.sampled_from(SPECIALS).map(lambda s: s[:-1]),
    )
).map("".join)


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with specials among its added tokens, and one of them in the vocabulary of
    the model itself.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
    )
    tokenizer.train_from_iterator(
        ["the answer is 42 assistant user system think call"] * 8, trainer
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_bytes(orjson.dumps({"vocab_size": 512}))
    return directory


@given(texts)
def test_bytes_round_trip_and_yield_no_special(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert not np.isin(ids, list(tokenizer.specials.values())).any()
    assert tokenizer.decode(ids) == text


def test_bytes_spell_specials_and_survive_bad_ids() -> None:
    tokenizer = ByteTokenizer()
    ids = np.array(
        [0xFF, 65, tokenizer.specials["<|im_end|>"], 999, -1, 0xC3, 0xA9], dtype=np.int32
    )
    assert tokenizer.decode(ids) == "\ufffdA<|im_end|>\ufffd\ufffdé"
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]


@given(texts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hugging_face_round_trip_and_yield_no_special(hf_directory: Path, text: str) -> None:
    tokenizer = _tokenizers.setdefault(hf_directory, HFTokenizer(hf_directory))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert not np.isin(ids, list(tokenizer.specials.values())).any()
    assert tokenizer.decode(ids) == text


_tokenizers: dict[Path, HFTokenizer] = {}


def test_hugging_face_special_inside_the_vocabulary_is_cut(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocab = {"[UNK]": 0, "<think>": 1, "<": 2, "think>": 3, "a": 4}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert HFTokenizer(tmp_path).encode("a <think> a").tolist() == [4, 2, 3, 4]


def test_vocabulary_counts_the_models_padding(hf_directory: Path) -> None:
    assert HFTokenizer(hf_directory).vocab_size == 512


def test_load_names_what_is_wrong(tmp_path: Path, hf_directory: Path) -> None:
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert isinstance(load_tokenizer(str(hf_directory)), HFTokenizer)
    with pytest.raises(ConfigError, match="did you mean `bytes`"):
        load_tokenizer("byte")
    with pytest.raises(ConfigError, match="a Hugging Face directory"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="no `model`"):
        load_tokenizer(str(tmp_path))
