"""Sphinx settings of the documentation: `make docs` writes it to `docs/_build/html`."""

from __future__ import annotations

project = "prorl"
copyright = "the prorl authors, Apache-2.0"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "prorl"
myst_heading_anchors = 3
nitpicky = False
# DuckDB's SQL has braces, which the highlighter of plain SQL does not know.
suppress_warnings = ["misc.highlighting_failure"]
