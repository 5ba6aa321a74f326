"""Makes our Python reachable for another uid where it lies in a private home: the home is hidden behind an empty tmpfs that holds
only the interpreter. In a mount namespace of its own, as root."""

from __future__ import annotations

import os

from prorl.sandbox import linux
from prorl.sandbox.launch import interpreter_roots


def needed() -> bool:
    """Whether some folder of the interpreter cannot be entered by others."""
    return any(_closed_ancestor(path) for path in interpreter_roots())


def show_interpreter() -> None:
    """In the caller's private mount namespace: cover closed homes, put the interpreter back at its own path."""
    hidden: dict[str, list[tuple[str, int]]] = {}
    for path in interpreter_roots():
        closed = _closed_ancestor(path)
        if closed is not None:
            hidden.setdefault(closed, []).append((path, linux.clone_tree(path)))
    for closed, trees in hidden.items():
        linux.mount("tmpfs", closed, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=64k,mode=755")
        for path, fd in trees:
            os.makedirs(path, exist_ok=True)
            linux.attach_tree(fd, path)
            os.close(fd)


def _closed_ancestor(path: str) -> str | None:
    """The topmost folder on the way to `path` that others may not enter."""
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:depth])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None
