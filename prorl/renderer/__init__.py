"""Messages <-> token ids: `make_renderer` gives a run the renderer of its model.

| module | owns |
|---|---|
| model | `TemplateRenderer`: any family, from the checkpoint's own chat template |
| chatml | `ChatMLRenderer`: no files, for the byte tokenizer and for toy models |
| proof | what is proved of a model when its renderer is made |
| load | the factory: from a directory to its renderer |
| template | reading a template and running it within bounds |
| guard | content never spells a marker, and what was sampled as none is none |
| family, grammar | the table of families; how each writes calls |
"""

from __future__ import annotations

from prorl.renderer.chatml import ChatMLRenderer as ChatMLRenderer
from prorl.renderer.load import describe as describe
from prorl.renderer.load import make_renderer as make_renderer
