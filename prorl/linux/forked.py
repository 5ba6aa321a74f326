"""Ends a forked child: it never runs on in its parent's code."""

from __future__ import annotations

import os
from typing import NoReturn

EXIT_CRASHED = os.EX_SOFTWARE
"""The exit status of a process of ours that met a bug of ours."""

EXIT_DRAINED = 3
"""The exit status of a part of the service that was asked to leave and has nothing in hand any
more.
"""

EXIT_REFUSED = 5
"""The service will never let it in as it is: to try again would be noise."""

EXIT_DISK = 6
"""The disk says no; it may say yes later."""

EXIT_REPLACED = 4
"""The exit status of a worker whose name another incarnation has taken."""


class ForkedChild:
    """Holds the body of a forked child, which ends whatever happens in it.

    What happened is told on `status_fd`.
    """

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> NoReturn:
        try:
            if error is not None and kind is not None:
                os.write(self._status_fd, f"error: {error or kind.__name__}".encode()[:4000])
        finally:
            os._exit(EXIT_CRASHED)
