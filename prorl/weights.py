"""Names of weights: versions, and how what servers state about theirs reads for a run."""

from __future__ import annotations

from typing import NamedTuple, NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Id of the weights that sampled a token: given by the gateway, monotone, never reused; 0 is the
start, -1 means context, or weights that nobody can name.
"""

FIRST_VERSION = PolicyVersion(0)
"""Of the weights that a run began with."""

UNKNOWN_VERSION = PolicyVersion(-1)
"""Of tokens whose server cannot prove which weights sampled them: they do not train."""


class RunWeights(NamedTuple):
    """What servers' labels say about a run's weights (`prorl/backends/labels.py`)."""

    tag: str
    """The run's: `TAG:VERSION:NONCE` names weights that it published."""
    start: tuple[str, ...] = ()
    """`TAG:VERSION` of weights that served when the run began: its version 0."""
    published: bool = False
    """Whether the run published any through the service: then a server that states none is not
    believed.
    """
