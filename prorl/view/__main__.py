"""`python -m prorl.view`: the pages of `prorl serve`, in a process of their own.

What somebody looks at costs the service no time, and a viewer that dies stops nothing but itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys

from prorl.errors import UserError
from prorl.linux.calls import die_with_parent
from prorl.view.server import Library, listen, user_name


def main() -> int:
    """Serve until a signal comes or the parent ends; 1 when the port is taken."""
    parser = argparse.ArgumentParser(prog="python -m prorl.view")
    parser.add_argument("runs", help="root of the runs")
    parser.add_argument("--service", required=True, help="root of the service that writes them")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM, arguments.parent)
    try:
        listening = listen(
            Library(arguments.runs, service=arguments.service), arguments.port, user_name()
        )
    except UserError as error:
        print(f"no pages: {error}", flush=True)
        return 1
    print(f"look at  {listening.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listening.serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
