"""Settings from a YAML file; not in `prorl.config`, since processes of a service read JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from prorl.errors import ConfigError
from prorl.types import Json


class _Loader(yaml.SafeLoader):
    """YAML with a key once in each mapping, as its specification says: PyYAML takes the last and
    loses a whole section without a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise MarkedYAMLError(
                    problem=f"the key `{key.value}` a second time", problem_mark=key.start_mark
                )
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)


def load_file(path: Path) -> dict[str, Json]:
    """Read a YAML (or JSON) mapping; raises ConfigError that says what is wrong with it."""
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}", "a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"config file {path}{line}: {problem}", "valid YAML") from None
    if not isinstance(values, dict):
        problem = "is empty" if values is None else f"holds {type(values).__name__}"
        raise ConfigError(f"config file {path} {problem}", "a mapping of settings")
    return values
