"""What a service on this host waits for and no counter tells: images in the making, dead servers.

Looked up here and now by the command that a person watches; nothing crosses the gateway for it.
"""

from __future__ import annotations

import fcntl
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from prorl.backends.catalogue import health_url
from prorl.sandbox.images.registry import default_root

ASK_S = 2.0
"""For a model server to say that it is well."""


def image_making_s(images: Path | None) -> float:
    """Seconds for which an image or a layer of packages has been in the making; 0 when none is.

    `images`: folder of the registry, by default the user's.
    """
    locks = ((images or default_root()) / "work").glob("*.lock")
    begun = [since for since in map(_held_since, locks) if since]
    return max(0.001, time.time() - min(begun)) if begun else 0.0


def _held_since(lock: Path) -> float:
    """When its maker took the lock; 0 for what a maker left that died: nobody holds it."""
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_ctime
    except FileNotFoundError:
        pass
    return 0.0


def image_words(making_s: float) -> str:
    """What INIT waits for, for people.

    >>> image_words(41.3)
    'INIT waits for an image or packages that are being made, for 41 s so far'
    """
    return f"INIT waits for an image or packages that are being made, for {making_s:.0f} s so far"


def server_trouble(url: str) -> str:
    """What became of asking a model server for its health, in words; empty when it is well."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(health_url(url), timeout=ASK_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}" if error.code >= 500 else ""
    except TimeoutError:
        return f"no answer within {ASK_S:g} s"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
