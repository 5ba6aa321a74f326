"""A model with tied embeddings as one whose output layer has weights of its own: the same function,
in a form that a vLLM reloads rightly.

    python -m prorl.trainer.untie trained/step-7 trained/step-7-untied

A vLLM that is given a directory of tied weights (measured: 0.32 on the CPU, SmolLM2) answers 200,
and samples with the old output layer; given an untied copy it samples with the new one, whichever
of the two it was started with. So trainers publish untied copies. A copy links the model's files,
and adds a file with the output layer, an index and another `config.json`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import orjson
from safetensors import safe_open
from safetensors.torch import save_file

from prorl.errors import ConfigError, UserError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
HEAD_FILE = "model-untied-lm-head.safetensors"
TIED_FILE = "model-tied.safetensors"
"""The name of `SINGLE_FILE` beside HEAD_FILE: transformers would read it alone."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def add_head(directory: Path) -> None:
    """Make a directory of tied weights one of untied weights. Raises ConfigError."""
    places: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file.name)
    embeddings = [name for name in places if name.endswith(EMBEDDING)]
    if len(embeddings) != 1 or HEAD in places:
        raise ConfigError(
            f"{directory} with {', '.join([*embeddings, *({HEAD} & places.keys())]) or 'neither'}",
            f"one ...{EMBEDDING} and no {HEAD}: the files of a model with tied embeddings",
        )
    if (directory / SINGLE_FILE).exists():
        (directory / SINGLE_FILE).rename(directory / TIED_FILE)
        places = dict.fromkeys(places, TIED_FILE)
    with safe_open(directory / places[embeddings[0]], framework="pt") as tensors:
        save_file({HEAD: tensors.get_tensor(embeddings[0])}, directory / HEAD_FILE)
    sizes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    index = {"metadata": {"total_size": sizes}, "weight_map": {**places, HEAD: HEAD_FILE}}
    _replace(directory / INDEX_FILE, index)
    config = orjson.loads((directory / "config.json").read_bytes())
    _replace(directory / "config.json", {**config, "tie_word_embeddings": False})


def link_tied(untied: Path, directory: Path) -> None:
    """Fill a directory with what an untied one was made of."""
    for file in untied.iterdir():
        if file.name not in (HEAD_FILE, INDEX_FILE, "config.json"):
            name = SINGLE_FILE if file.name == TIED_FILE else file.name
            os.link(file, directory / name)
    config = orjson.loads((untied / "config.json").read_bytes())
    _replace(directory / "config.json", {**config, "tie_word_embeddings": True})
    index = orjson.loads((untied / INDEX_FILE).read_bytes())
    places = {name: file for name, file in index["weight_map"].items() if name != HEAD}
    if TIED_FILE not in places.values():  # shards
        sizes = sum((directory / file).stat().st_size for file in set(places.values()))
        _replace(directory / INDEX_FILE, {"metadata": {"total_size": sizes}, "weight_map": places})


def _replace(path: Path, values: object) -> None:
    path.unlink(missing_ok=True)  # it may be a link to a file of the tied directory
    path.write_bytes(orjson.dumps(values, option=orjson.OPT_INDENT_2))


def untie(model: Path, out: Path) -> None:
    """Write an untied copy of a model's directory. Raises ConfigError."""
    if out.exists():
        raise ConfigError(f"{out} exists", "a directory that does not")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json", "a Hugging Face directory")
    unfinished = out.with_name(f"{out.name}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        for file in filter(Path.is_file, model.iterdir()):
            if file.suffix in (".pt", ".pth", ".bin"):  # a trainer's own state
                continue
            try:
                os.link(file.resolve(), unfinished / file.name)
            except OSError:  # another file system
                shutil.copyfile(file, unfinished / file.name)
        add_head(unfinished)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> int:
    if len(sys.argv) != 3:
        print("python -m prorl.trainer.untie MODEL OUT", file=sys.stderr)
        return 2
    try:
        untie(Path(sys.argv[1]), Path(sys.argv[2]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
