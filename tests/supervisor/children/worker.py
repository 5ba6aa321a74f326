"""A child for the supervisor's tests: `worker.py MODE DIR` announces itself and then behaves as
MODE says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from prorl.linux import crashes, heartbeat


def main() -> None:
    mode, where = sys.argv[1], Path(sys.argv[2])
    if mode == "refuses":
        print("some log line", file=sys.stderr)
        sys.exit("error: port 80 is taken")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: leave(mode, where))
    print("chatter before", flush=True)
    if mode == "late" and not_first(where):
        time.sleep(3600)
    print('ready {"http_port": 4711}', flush=True)
    if mode == "crashes":
        print("out of luck", file=sys.stderr)
        os._exit(3)
    if mode == "hangs":
        asyncio.run(hang(where))
    if mode == "no-disk" and (where / "no disk").exists():
        print("the disk says no", file=sys.stderr, flush=True)
        os._exit(6)
    if mode == "replaced":
        os._exit(4)
    if mode == "refused":
        print('{"event": "the token has ended"}', file=sys.stderr, flush=True)
        os._exit(5)
    while True:
        if mode == "beats":
            os.write(int(os.environ["PRORL_HEARTBEAT_FD"]), b".")
        time.sleep(0.1 if mode == "beats" else 60)


async def hang(where: Path) -> None:
    """Beat, then hang in a step of one of many pieces of work: another one in each second
    incarnation.
    """
    heartbeat.SAYS_S = 1.3
    heartbeat.start()
    crashes.start()
    with (where / "hung").open("a") as file:
        file.write("x")
    with (where / "died at").open("a") as file:
        file.write(os.environ.get(crashes.FATAL_ATTEMPT, "unknown") + "\n")
    number = ((where / "hung").stat().st_size - 1) // 2
    loop = asyncio.get_running_loop()
    others = [
        loop.create_task(crashes.attribute_steps(f"r/{other}/1", asyncio.sleep(3600)))
        for other in range(100, 105)
    ]
    await asyncio.sleep(0.1)
    assert others
    await loop.create_task(crashes.attribute_steps(f"r/{number}/1", stalled()))


async def stalled() -> None:
    await asyncio.sleep(0.2)
    time.sleep(3600)


def not_first(where: Path) -> bool:
    """Returns whether this is the second incarnation; the third is as the first."""
    with (where / "lives").open("a") as file:
        file.write("x")
    with (where / "died at").open("a") as file:
        file.write(os.environ.get(crashes.FATAL_ATTEMPT, "unknown") + "\n")
    return (where / "lives").stat().st_size == 2


def leave(mode: str, where: Path) -> None:
    with (where / "order").open("a") as file:
        file.write(mode + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
