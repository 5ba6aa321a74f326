"""The stages that a rollout passes, as data: whoever must know them reads this table.

    gateway --lease--> INIT --ready--> RUN --ran--> EVAL --scored--> store

A row takes what the row above it gives, so that a further operator is one file and one row here: a
critic between RUN and EVAL that takes `ran` and gives `ran`. Who adds columns names an edge of its
own and says its schema in `prorl.schema.EDGES`. A further stage's pool is `pools.NAME` of the
service's config. Imports neither Arrow nor an operator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageRow:
    name: str
    """Also the role of its workers."""
    gives: str
    """The edge that it serves; its schema is `EDGES[gives]`."""
    operator: str
    """`module:class` of its `StageOperator`."""
    redelivers: bool = True
    """True if it keeps rows until they are acked, and sends them again when a stream is lost."""


class Graph:
    def __init__(self, *rows: StageRow) -> None:
        self.rows = rows

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of workers that have a control stream."""
        return (*self.names, "store")

    @property
    def redelivered(self) -> frozenset[str]:
        """The edges whose rows are sent again after a loss."""
        return frozenset(row.gives for row in self.rows if row.redelivers)

    @property
    def separable(self) -> tuple[str, ...]:
        """The stages that may leave their chain: what they take is kept until it is stored."""
        return tuple(name for name in self.names if self.takes(name) in self.redelivered)

    def row(self, name: str) -> StageRow:
        return self.rows[self.names.index(name)]

    def upstream(self, role: str) -> str:
        """The stage whose rows a role takes; empty for the first, whose upstream is the gateway."""
        place = self.roles.index(role)
        return self.names[place - 1] if place else ""

    def path(self, stage: str) -> str:
        """Returns where a stage serves its edge; `edge/lease` for the gateway, whose name is empty.

        Of several stages of one process that give the same edge, only the last has it to itself.
        """
        edge = self.row(stage).gives if stage else "lease"
        givers = [row.name for row in self.rows if row.gives == edge]
        return f"edge/{edge}" if givers[-1:] in ([], [stage]) else f"edge/{edge}/{stage}"

    def takes(self, role: str) -> str:
        """The edge that a role dials."""
        upstream = self.upstream(role)
        return self.row(upstream).gives if upstream else "lease"


GRAPH = Graph(
    StageRow("init", "ready", "prorl.stages.init:InitOperator", redelivers=False),
    StageRow("run", "ran", "prorl.stages.run:RunOperator"),
    StageRow("eval", "scored", "prorl.stages.eval:EvalOperator"),
)
