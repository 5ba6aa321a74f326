"""The view that a tool has of the sandbox in which it works: one record for all tools of a
server.
"""

from __future__ import annotations

from prorl.tools.server.light import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl.tools.server.children import MakeRoom
    from prorl.tools.server.events import Events


class Folder:
    def __init__(self, cwd: str) -> None:
        self.cwd = cwd


class Place(Folder):
    def __init__(
        self,
        events: Events,
        room: MakeRoom,
        env: dict[str, str],
        cwd: str,
        python: str,
        packages: Sequence[str],
        layer: str,
    ) -> None:
        super().__init__(cwd)
        self.events, self.room, self.env = events, room, env
        self.python = python
        """The interpreter, for tools that are programs of its."""
        self.packages = packages
        """Folders of the host's packages that are shown inside."""
        self.layer = layer
        """The virtual environment with the task's packages; empty: it has none."""
