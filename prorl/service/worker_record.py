"""What the gateway knows of a worker, and for how long one that is away is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prorl.control import Stats
from prorl.service.ordered import Ordered

if TYPE_CHECKING:
    from prorl.service.state import RolloutRecord

REMOTE_GRACE_S = 15.0
"""gRPC ends a stream ten seconds after data that nobody acknowledged, and dialling takes less than
one: a blip costs nothing. On the service's own host a stream ends with its process, at once.
"""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A process with a control stream."""

    name: str
    session: int
    incarnation: str
    role: str
    node: str
    pid: int
    location: str
    slots: int
    held: Ordered[RolloutRecord] = field(default_factory=Ordered)
    stats: Stats | None = None
    """What it said last; None until it says something."""
    seen_at: float = 0.0
    quiet_s: float = 0.0
    """For how long we have listened to it in vain."""
    remote: bool = False
    """On another host than the gateway."""
    leaving: bool = False
    """It was asked to leave: what it gives back is charged to nobody."""
    resumes: bool = False
    """Whoever comes after it under its name goes on with what it held."""
    endpoints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What it was told last."""
    home: str = ""
    """Of its node's life: two lives of one node may be there for a moment, each with sandboxes."""
    images: Mapping[str, str] | None = None
    """Digests of its node's images by name; None: it may have any."""

    @property
    def grace_s(self) -> float:
        """How long it may be away before what it holds is lost.

        A cable may have been pulled, or its next life is about to read its journal.
        """
        waited_for = self.remote or (self.resumes and not self.leaving)
        return REMOTE_GRACE_S if waited_for else 0.0
