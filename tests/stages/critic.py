"""A further operator, as somebody would write it: it reads what RUN gives and passes it on."""

from __future__ import annotations

from dataclasses import dataclass

from prorl.schema import RAN
from prorl.schema.rows import Added, Row
from prorl.stages.operator import StageOperator


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(Added):
    """Adds no column."""

    schema = RAN


class Critic(StageOperator):
    """Counts the turns that it has read."""

    stage = "critic"
    num_turns = 0

    async def __call__(self, row: Row) -> Added:
        """Read one row."""
        Critic.num_turns += len(row.value("turns"))
        return Nothing()
