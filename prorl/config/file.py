"""Settings from a YAML file; not in `prorl.config`, since processes of a service read JSON."""

from __future__ import annotations

from pathlib import Path

import yaml

from prorl.errors import ConfigError
from prorl.types import Json


def load_file(path: Path) -> dict[str, Json]:
    """Read a YAML (or JSON) mapping; raises ConfigError that says what is wrong with it."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}", "a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"config file {path}{line}: {what}", "valid YAML") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"config file {path} holds {type(values).__name__}", "a mapping of settings"
        )
    return values
