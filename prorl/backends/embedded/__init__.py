"""Inference inside prorl, for machines without vLLM: Qwen3-shaped checkpoints in numpy, no torch.

    python -m prorl.backends.embedded --model prorl/assets/toy
        serves vLLM's token subset, prints `ready {json}`

This file imports nothing heavy, so that the process can settle the number of BLAS threads before
numpy is loaded.
"""

from pathlib import Path

TOY = Path(__file__).parents[2] / "assets" / "toy"
"""The checkpoint that ships with the package: 0.5 million parameters, good for `prorl demo` and
tests and nothing else.
"""
