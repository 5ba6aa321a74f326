"""The zip of users' tools that this sandboxd's sandboxes read.

It is packed when the first sandbox asks for one (`prorl/tools`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prorl.errors import SandboxError
from prorl.tools import user_bundle
from prorl.tools.catalogue import CATALOGUE
from prorl.tools.user_bundle import UserBundle
from prorl.types import FailureCode


class UserTools:
    """Packs users' tools into `<folder>/tools.zip`, once, and says who is not in it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tools.zip"
        self._bundle: UserBundle | None = None

    def path_for(self, names: Iterable[str]) -> str:
        """The zip's path if one of these tools is a user's, else an empty string.

        Raises SandboxError (`bad_task`).
        """
        users = sorted(set(names) - set(CATALOGUE))
        if not users:
            return ""
        bundle = self._packed()
        for name in users:
            if name not in bundle.names:
                known = ", ".join(sorted({*CATALOGUE, *bundle.names}))
                raise SandboxError(
                    FailureCode.BAD_TASK,
                    bundle.problems.get(name, f"no tool {name!r} on this node; there are {known}"),
                )
        return str(self._path)

    def _packed(self) -> UserBundle:
        if self._bundle is None:
            bundle = user_bundle.build()
            self._path.parent.mkdir(mode=0o755, exist_ok=True)
            self._path.write_bytes(bundle.content)
            self._path.chmod(0o644)  # each sandbox's own uid opens it again by its descriptor
            self._bundle = bundle
        return self._bundle
