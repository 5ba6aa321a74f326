"""A child for the supervisor's tests: `worker.py MODE DIR` announces itself and then behaves as
MODE says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


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
    if mode == "replaced":
        os._exit(4)
    while True:
        if mode == "beats":
            os.write(int(os.environ["PRORL_HEARTBEAT_FD"]), b".")
        time.sleep(0.1 if mode == "beats" else 60)


def not_first(where: Path) -> bool:
    """Whether this is the second life; the third is as the first."""
    with (where / "lives").open("a") as file:
        file.write("x")
    return (where / "lives").stat().st_size == 2


def leave(mode: str, where: Path) -> None:
    with (where / "order").open("a") as file:
        file.write(mode + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
