"""The zip of users' tools that this sandboxd's sandboxes read; packed when the first sandbox asks
for one (`prorl/tools`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prorl.errors import SandboxError
from prorl.plugins import SERVED_TOOLS
from prorl.types import FailureCode

USER_BUNDLE = "prorl.tools.user_bundle"
"""Loaded by name: what runs inside is not a part of this package."""


class UserTools:
    """Owns `<folder>/tools.zip`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tools.zip"
        self._bundle: Any = None

    def path_for(self, names: Iterable[str]) -> str:
        """The zip's path if one of these tools is a user's, else an empty string.

        Raises SandboxError (`bad_task`).
        """
        users = sorted(set(names) - SERVED_TOOLS)
        if not users:
            return ""
        bundle = self._packed()
        for name in users:
            if name not in bundle.names:
                known = ", ".join(sorted(SERVED_TOOLS | bundle.names))
                raise SandboxError(
                    FailureCode.BAD_TASK,
                    bundle.problems.get(name, f"no tool {name!r} on this node; there are {known}"),
                )
        return str(self._path)

    def _packed(self) -> Any:
        if self._bundle is None:
            bundle = importlib.import_module(USER_BUNDLE).build()
            self._path.parent.mkdir(mode=0o755, exist_ok=True)
            self._path.write_bytes(bundle.content)
            self._path.chmod(0o644)  # each sandbox's own uid opens it again by its descriptor
            self._bundle = bundle
        return self._bundle
