"""Nodes without sandboxes, many in one process: what the gateway sees of real ones."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from prorl.control import ControlRow, Endpoints, Kind, Started, Welcome
from prorl.flight import ControlClient, FlightNetwork, Identity, Inlet
from prorl.types import AttemptKey

STAGES = ("init", "run", "eval")


@dataclass
class Board:
    """What all nodes have seen, kept on their loop."""

    told: int = 0
    """Messages with addresses of others, besides the welcome's."""
    leased_at: dict[str, float] = field(default_factory=dict)
    """By task id."""


class Node:
    """Three workers of one name, of which INIT takes leases and keeps them."""

    def __init__(self, network: FlightNetwork, gateway: str, name: str, slots: int, board: Board):
        self._board, self._held = board, list[AttemptKey]()
        self._clients: list[ControlClient] = []
        self._gateway = gateway
        for stage in STAGES:
            identity = Identity(
                role=stage,
                worker=f"{name}/{stage}-0",
                node=name,
                location=f"grpc+tls://127.0.0.1:1/{name}/{stage}" if stage != "eval" else "",
                slots=slots,
                remote=True,
            )
            on = {Kind.WELCOME: self._welcome, Kind.ENDPOINTS: self._endpoints}
            held = self._holds if stage == "init" else tuple
            client = ControlClient(network, gateway, identity, held=held, on=on)
            self._clients.append(client)
            if stage == "init":
                self._inlet = Inlet(network, "lease", identity.hello(), slots=slots)
        self._welcomes = 0
        self._taking: asyncio.Task[None] | None = None

    def _holds(self) -> tuple[AttemptKey, ...]:
        return tuple(self._held)

    def start(self) -> None:
        """Dial the gateway, for ever."""
        for client in self._clients:
            client.start()
        self._inlet.set_upstreams([self._gateway])
        self._taking = asyncio.ensure_future(self._take())

    async def _take(self) -> None:
        while taken := await self._inlet.take():
            for one in taken:
                self._held.append(one.key)
                self._board.leased_at[one.row.value("task_id")] = time.monotonic()
                self._clients[0].emit(Started(), one.key, stage="init")

    def _welcome(self, row: ControlRow) -> None:
        # The client hands the welcome's own addresses on as well: they cost no message.
        self._board.told -= 1
        row.read(Welcome)

    def _endpoints(self, row: ControlRow) -> None:
        self._board.told += 1
        row.read(Endpoints)

    async def close(self) -> None:
        """Leave without a word."""
        await self._inlet.close()
        if self._taking is not None:
            await self._taking
        await asyncio.gather(*(client.close() for client in self._clients))
