"""What `prorl bench stream` measures: how many trajectories of which shape."""

from __future__ import annotations

from prorl.bench.synthetic import Shape

RUN = "bench"
TRAJECTORIES, SHORT = 512, 64
SHAPE = Shape(n=8, num_tokens=16384, sampled_share=0.25, num_turns=14, vocab_size=150_000)
COMMAND = "python -m prorl.bench.stream_paths"
