"""The same pages in one HTML file: data inlined, charts alive, nothing asked of anybody.

A frozen copy holds what the server would have answered; it may run the script that it holds and
reach no address. What tasks and policies wrote is JSON in a block that no script runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from prorl.analysis.analyses import ANALYSES
from prorl.analysis.curves import AXES
from prorl.types import Json
from prorl.view.opened import Question
from prorl.view.server import STATIC, Library, plain
from prorl.view.tokens import tokens

MODULES = (
    *("dom", "charts", "table", "curves", "pages"),
    *("terminal", "find", "rollout", "main"),
)
"""In the order in which they import each other."""

ROWS = 500
CHOSEN = (
    "select rollout_id from rollouts where valid order by reward, rollout_id limit 4",
    "select rollout_id from rollouts where valid order by reward desc, rollout_id limit 4",
    "select rollout_id from rollouts where failure_code <> '' order by rollout_id limit 4",
)
"""Rollouts that a copy holds whole if none are named: some of the worst, best and failed."""

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)


def freeze(where: str, rollouts: Iterable[int] = ()) -> str:
    """Returns a run as one HTML file, these rollouts whole. Raises as Opened, NotFoundError."""
    library = Library.at(where)
    (name,) = library.names()
    opened = library.open(name)
    rollout_ids = list(rollouts) or [
        row["rollout_id"] for sql in CHOSEN for row in opened.answer(sql)
    ]
    page = opened.page(Question(), 0, ROWS)
    run = f"/runs/{opened.stored.run_id}"
    answers: dict[str, Json] = {
        "/runs": {"runs": [opened.stored.run_id]},
        run: opened.about(),
        f"{run}/rows": page | {"total": len(page["rows"])},
        f"{run}/facets": {"facets": opened.facets(Question())},
        **{f"{run}/figures/{figure}": opened.figure(figure) for figure in ANALYSES},
        **{f"{run}/curves/{axis}": opened.curves(axis) for axis in AXES},
    }
    for rollout_id in dict.fromkeys(rollout_ids):
        around = opened.neighbours(Question(), rollout_id)
        answers[f"{run}/rollouts/{rollout_id}"] = opened.rollout(rollout_id) | {"around": around}
        answers[f"{run}/rollouts/{rollout_id}/tokens"] = tokens(
            opened, library.pieces(opened), rollout_id
        )
    return html(answers)


def html(answers: Any) -> str:
    """The page with its files inlined; `<` in data can end no block."""
    data = orjson.dumps(answers, default=plain, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    style = "".join(_text(name) for name in ("vendor/uplot.min.css", "style.css"))
    script = "\n".join(_inlined(_text(f"{name}.js")) for name in MODULES)
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>prorl</title><style>{style}</style>"
    )
    body = _text("index.html").partition("<body>")[2].partition("</body>")[0]
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{body}'
        f'<script type="application/json" id="frozen">{data.replace("<", chr(92) + "u003c")}'
        f"</script><script>{_text('vendor/uplot.min.js')}</script>"
        f'<script type="module">{script}</script></body></html>'
    )


def _inlined(module: str) -> str:
    """A module among others in one script."""
    alone = re.sub(r"^import\b.*?;\n", "", module, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^export ", "", alone, flags=re.MULTILINE)


def _text(name: str) -> str:
    return (STATIC / name).read_text()
