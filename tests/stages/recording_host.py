"""A sandboxd that starts nothing and writes down what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prorl.protocols import Sandbox, SandboxHost
from prorl.types import SandboxRef, SandboxSpec


@dataclass
class RecordingHost:
    """`trouble(verb, owner)` may raise."""

    node_id: str = "local"
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    live: dict[str, SandboxRef] = field(default_factory=dict)
    trouble: Callable[[str, str], None] = lambda verb, owner: None

    def _ask(self, verb: str, owner: str, purpose: str = "") -> None:
        self.requests.append((verb, owner, purpose))
        self.trouble(verb, owner)

    async def start(self, owner: str, purpose: str, spec: SandboxSpec) -> SandboxRef:
        self._ask("start", owner, purpose)
        ref = SandboxRef("local", f"{owner}:{purpose}:{len(self.requests)}", "/nowhere")
        self.live[ref.sandbox_id] = ref
        return ref

    async def reserve(self, owner: str, purpose: str, spec: SandboxSpec) -> None:
        self._ask("reserve", owner, purpose)

    async def prepare(
        self, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
    ) -> bool:
        self._ask("prepare", key)
        await work()
        return False

    async def close_targets(self, targets: Iterable[tuple[str, int]]) -> None:
        pass

    async def stop(self, ref: SandboxRef) -> None:
        self.requests.append(("stop", ref.sandbox_id.split(":")[0], ""))
        self.live.pop(ref.sandbox_id, None)

    async def stop_owner(self, owner: str) -> None:
        self.requests.append(("stop_owner", owner, ""))
        self.live = {
            name: ref for name, ref in self.live.items() if not name.startswith(f"{owner}:")
        }

    @asynccontextmanager
    async def connect(self, ref: SandboxRef) -> AsyncIterator[object]:
        self._ask("connect", ref.sandbox_id.split(":")[0])
        yield object()


def as_host(host: RecordingHost) -> SandboxHost:
    return host  # type: ignore[return-value]
