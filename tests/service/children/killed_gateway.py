"""A gateway that is killed (SIGKILL) right after the transaction that accepts a group: durable, and
nobody has been told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork
from prorl.service.log.log import ControlLog, Write
from prorl.service.log.log_schema import INSERT_GROUP
from prorl.service.serve import serving


class KilledAfterAccept(ControlLog):
    """Dies when a group is on disk."""

    def write_now(self, writes: Sequence[Write]) -> None:
        """Write, then die if a group was in it."""
        super().write_now(writes)
        if any(statement == INSERT_GROUP for statement, _ in writes):
            os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    """Serve until then."""
    config = ServiceConfig.model_validate_json(Path(sys.argv[2]).read_text())
    log = KilledAfterAccept(config.root / "control.db")
    async with (
        FlightNetwork(token=config.token) as network,
        serving(config, network, log) as served,
    ):
        print(f'ready {{"http": "{served.http}"}}', flush=True)
        await served.failed()


if __name__ == "__main__":
    asyncio.run(main())
