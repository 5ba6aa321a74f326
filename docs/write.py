"""Writes what the pages take from the code: `python docs/write.py`; `--check` only compares.

docs/settings.md, docs/columns.md and docs/times.md are written whole. In the other pages a comment
`<!-- docstring: MODULE NAME ... -->` is followed by a block of text: the docstrings of a module and
of the names in it (`*`: of all classes), so that the page can be read where nothing builds it.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from inspect import cleandoc, getdoc
from pathlib import Path
from types import ModuleType

from prorl.cli.commands.schema import columns_page, settings_page
from prorl.waits import times_page

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- docstring: ([\w.* ]+) -->\n)```text\n.*?```\n", re.DOTALL)


def pages() -> dict[Path, str]:
    """Returns the text that each page of `docs/` should have, by its path."""
    texts = {path: BLOCK.sub(_block, path.read_text()) for path in sorted(DOCS.glob("*.md"))}
    texts[DOCS / "settings.md"] = "\n".join(settings_page()) + "\n"
    texts[DOCS / "columns.md"] = columns_page() + "\n"
    texts[DOCS / "times.md"] = "\n".join(times_page()) + "\n"
    return texts


def _block(comment: re.Match[str]) -> str:
    module_name, *names = comment[2].split()
    module = import_module(module_name)
    parts = [cleandoc(module.__doc__ or "")]
    for name in names if names != ["*"] else _classes(module):
        parts.append(f"{name}\n" + _indented(getdoc(getattr(module, name)) or ""))
    return f"{comment[1]}```text\n" + "\n\n".join(parts) + "\n```\n"


def _classes(module: ModuleType) -> list[str]:
    """Returns the public classes of a module that have docstrings of their own."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and name[0] != "_"
        if not (value.__dict__.get("__doc__") or f"{name}(").startswith(f"{name}(")
    ]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    stale = {
        path: text
        for path, text in pages().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        print(path.relative_to(DOCS.parent))
        if "--check" not in sys.argv:
            path.write_text(text)
    sys.exit("--check" in sys.argv and bool(stale))
