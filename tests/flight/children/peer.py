"""A peer process: `peer.py listen LOCATION` or `peer.py dial LOCATION`; says `ready` and then holds
a stream open for ever.
"""

from __future__ import annotations

import asyncio
import sys

from prorl.flight import FlightNetwork
from prorl.protocols import Channel
from tests.flight.test_network import NUMBERS, batch


async def hold(channel: Channel) -> None:
    channel.send(batch(1))
    while await channel.receive() is not None:
        pass


async def main(verb: str, location: str) -> None:
    network = FlightNetwork(token="secret")
    if verb == "listen":
        await network.listen(location, {"p": (hold, NUMBERS, NUMBERS)})
        print("ready", flush=True)
        await asyncio.Event().wait()
    else:
        channel = await network.dial(location, "p", {}, NUMBERS, NUMBERS)
        print("ready", flush=True)
        await hold(channel)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
