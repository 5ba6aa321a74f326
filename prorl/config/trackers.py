"""The trackers that a run may name (`run.track`), and the packages that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Literal

from prorl.errors import ConfigError

TrackerName = Literal["tensorboard", "wandb", "otlp"]

OTLP = "otlp"
"""Rollouts as OpenTelemetry traces; the others get the curves."""

_MODULES: Mapping[TrackerName, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "otlp": ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise ConfigError for a tracker whose package is not installed here."""
    for name in names:
        if not all(map(_is_installed, _MODULES[name])):
            raise ConfigError(
                f"run.track: no package for {name} here",
                "it installed",
                f"pip install 'prorl[{name}]'",
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
