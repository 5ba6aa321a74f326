"""Makes our Python and the image reachable for another uid where they lie in a private home.

The home is hidden behind an empty tmpfs that holds only them. In a mount namespace of its own, as
root.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from prorl.linux import calls
from prorl.sandbox.launch.spec import interpreter_roots


def needed(layer: str = "") -> bool:
    """Whether some folder of the interpreter, or the layer, cannot be entered by others."""
    paths = (*interpreter_roots(), *filter(None, (layer,)))
    return any(_closed_ancestor(path) for path in paths)


def show_interpreter(others: Sequence[tuple[str, int]] = ()) -> None:
    """In the caller's private mount namespace: cover closed homes, put the interpreter and `others`
    back at their own paths.

    `others`: paths with a clone of their mount each; those outside closed homes are covered by
    their clone.
    """
    hidden: dict[str, list[tuple[str, int]]] = {}
    for path, fd in (*((path, -1) for path in interpreter_roots()), *others):
        closed = _closed_ancestor(os.path.dirname(path))
        if closed is not None:
            hidden.setdefault(closed, []).append((path, calls.clone_tree(path) if fd < 0 else fd))
        elif fd >= 0:
            _attach(path, fd)
    for closed, trees in hidden.items():
        calls.mount("tmpfs", closed, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "size=64k,mode=755")
        for path, fd in trees:
            _attach(path, fd)


def _attach(path: str, fd: int) -> None:
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    calls.attach_tree(fd, path)
    os.close(fd)


def _closed_ancestor(path: str) -> str | None:
    """The topmost folder on the way to `path` that others may not enter."""
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:depth])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None
