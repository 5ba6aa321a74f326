"""The daemon's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from prorl.sandbox import kinds
from prorl.sandbox.node.settings import Settings

DEFAULTS = Settings()
HELP = {
    "socket": "Unix socket to listen on, under 100 bytes",
    "root": "folder for notes and workspaces, one per daemon",
    "parent-pid": "die with this process",
    "images": "folder of the image registry; default: in the user's cache folder",
    "image": "image of sandboxes whose task names none",
    "snapshot-bytes": "of prepared workspaces kept for siblings",
}
NUMBERS = ("max-sandboxes", "parallel-starts", "warm", "snapshot-bytes")
"""Options that are numbers of `Settings`."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line; exits with usage for what it does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m prorl.sandbox.node.daemon", description="Owns the sandboxes of one node."
    )
    for name in ("socket", "root"):
        parser.add_argument(f"--{name}", required=True, help=HELP[name])
    known = f"{', '.join(kinds.known())}; auto = first that works of {kinds.automatic()}"
    parser.add_argument("--kind", default=kinds.AUTO, help=known)
    parser.add_argument("--node-id", default="local")
    parser.add_argument("--parent-pid", type=int, default=0, help=HELP["parent-pid"])
    for name in NUMBERS:
        default: int = getattr(DEFAULTS, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=HELP.get(name))
    for name in ("images", "image"):
        parser.add_argument(f"--{name}", default=getattr(DEFAULTS, name), help=HELP[name])
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> Settings:
    """What the pool is told of the options."""
    return Settings(
        max_sandboxes=options.max_sandboxes,
        parallel_starts=options.parallel_starts,
        warm=options.warm,
        images=options.images,
        image=options.image,
    )
