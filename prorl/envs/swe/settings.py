"""Settings files of a repository that are partly the test runner's.

Pure functions over contents that a policy may have chosen.
"""

from __future__ import annotations

import configparser
import json
import tomllib

from prorl.types import Json


def runner_part(path: str, content: bytes | None) -> str:
    """What a settings file says to the test runner, as text to compare; empty: nothing.

    >>> runner_part("pyproject.toml", b"[project]\\nname = 'x'"), runner_part("setup.cfg", b"[tool:pytest]\\naddopts=-p x")
    ('', '{"tool:pytest": {"addopts": "-p x"}}')
    """
    if content is None:
        return ""
    text = content.decode("utf-8", "replace")
    try:
        found = _READERS[path.rpartition("/")[2]](text)
    except (ValueError, configparser.Error, RecursionError, AttributeError):
        return f"unreadable {text}"
    kept = {key: value for key, value in found.items() if value}
    return json.dumps(kept, sort_keys=True, default=str) if kept else ""


def _pyproject(text: str) -> dict[str, Json]:
    document = tomllib.loads(text)
    tools, project = document.get("tool", {}), document.get("project", {})
    found = {name: tools.get(name) for name in ("pytest", "tox", "nox", "coverage", "hatch")}
    return {**found, "entry-points": project.get("entry-points")}


def _setup_cfg(text: str) -> dict[str, Json]:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    names = (
        "tool:pytest",
        "pytest",
        "nosetests",
        "aliases",
        "options.entry_points",
        "coverage:run",
    )
    return {name: dict(parser[name]) for name in names if parser.has_section(name)}


def _package_json(text: str) -> dict[str, Json]:
    document = json.loads(text)
    names = ("scripts", "jest", "mocha", "ava", "nyc", "c8", "babel", "vitest", "type")
    return {name: document.get(name) for name in names}


_READERS = {"pyproject.toml": _pyproject, "setup.cfg": _setup_cfg, "package.json": _package_json}
SETTINGS = tuple(_READERS)
"""Files of which one part is the runner's."""
