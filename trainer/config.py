"""Settings of a training run: one YAML or JSON file, checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from prorl.trainer.loss import LossConfig


class TrainerConfig(LossConfig):
    """Holds what `python -m prorl.trainer --config FILE` reads, with the coefficients of the loss.
    Paths are relative to the working directory.
    """

    service: str = Field(
        description="http://host:port, a service's root directory, or grpc://host:port of a replay"
    )
    run: str
    consumer: str = "primary"
    model: Path = Field(description="Hugging Face directory to start from")
    output: Path = Field(description="gets checkpoints/ and metrics/")

    lineage: Literal["off", "rows", "logprobs"] = Field(
        default="rows",
        description=(
            "what the run remembers of each sequence that made a checkpoint; logprobs: the"
            " learner's, of every sampled token, too"
        ),
    )

    steps: int = Field(ge=1)
    groups_per_step: int = Field(default=32, ge=1)
    minibatches: int = Field(
        default=1, ge=1, description="optimizer steps per step, over equal shares of its groups"
    )
    tokens_per_pass: int = Field(
        default=16384,
        ge=1,
        description="a forward pass takes sequences up to that many tokens, at least one",
    )

    learning_rate: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=5, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    advantages: str = Field(
        default="group",
        description="group, centred, rloo, or module:attr of a function: whole groups in, [B] out",
    )
    overlong_tokens: int = Field(
        default=0,
        ge=0,
        description="rollouts of more sampled tokens lose 1 of their reward; 0 = none do",
    )
    overlong_buffer: int = Field(
        default=512, ge=1, description="tokens below it over which the loss of reward grows"
    )

    publish: bool = Field(
        default=True, description="give each step's weights to the service; off for a replay"
    )
    untie: bool = Field(
        default=True,
        description="publish a model with tied embeddings with an output layer of its own: a vLLM"
        " that is given tied weights goes on with its old one. It costs one more copy of the"
        " embedding each step",
    )
    tasks: Path | None = Field(
        default=None,
        description="JSON lines of tasks, all that the run will have, submitted at the start: a run"
        " with `epochs` feeds itself from them; none: others submit",
    )
    n: int = Field(default=8, ge=1, description="rollouts per submitted task")
    max_staleness: int = Field(
        default=-1,
        ge=-1,
        description="older tokens do not train (the service's own bound comes first); -1 = any",
    )

    seed: int = 0
    threads: int = Field(
        default=1, ge=1, description="threads of torch; two collapse on contended cores"
    )
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="type of matrix products and of what samplers load; updates are float32",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute each layer again for its gradient: less memory"
    )
    checkpoint_steps: int = Field(
        default=0,
        ge=0,
        description="write a checkpoint, and commit, after so many steps; each step's weights are"
        " published all the same. 0 = as many as half of the run's max_uncommitted_groups covers,"
        " at most 10",
    )
    checkpoint_s: float = Field(
        default=600.0, gt=0, description="and whenever the last one began so many seconds ago"
    )
    keep_checkpoints: int = Field(default=3, ge=2)
    wait_s: float = Field(default=10.0, gt=0, le=600)
