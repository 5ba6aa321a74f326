"""PYTHONPATH for children whose environment is made for them, or who start in another folder.

prorl may be there and nowhere else: `pip install --target DIR`, as cluster modules have it.
"""

from __future__ import annotations

import os


def python_path() -> dict[str, str]:
    """The variable with our own entries made absolute; nothing where we have none."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(map(os.path.abspath, entries))
    return {"PYTHONPATH": path} if path else {}
