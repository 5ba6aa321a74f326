"""Files of an object store as Arrow's datasets read them, on threads of Arrow's own.

No Python error may come out of them: to put one into words, Arrow waits for Python's lock while it
holds a lock of its own, and whoever has Python's lock and starts a scan at that moment waits for
the latter. Both then wait for ever (pyarrow 26, `Scanner.to_reader`). So a read that fails in the
end gives no bytes: Arrow says in its own words that the file ends too early, and the reason is
logged.
"""

from __future__ import annotations

import io
import logging
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs

from prorl.storage.objects import PAUSES_S, failures

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("prorl.storage")

TRIES = 4


class ObjectFiles(pafs.FSSpecHandler):  # type: ignore[misc]
    """An fsspec filesystem whose files never raise."""

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Raises nothing: a file that cannot be opened has no bytes."""
        opened = _tried(lambda: self.fs.open(path, mode="rb"), path, io.BytesIO())
        return pa.PythonFile(_Quiet(opened, path), mode="r")


class _Quiet:
    """What `pa.PythonFile` needs of a file."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def read(self, size: int = -1) -> bytes:
        return bytes(_tried(lambda: self._file.read(size), self._path, b""))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


def _tried(what: Callable[[], Any], path: str, otherwise: Any) -> Any:
    """Beyond the tries of the store's own client; not for what is not there."""
    for wait_s in (*PAUSES_S[: TRIES - 1], None):
        try:
            return what()
        except FileNotFoundError:
            return otherwise
        except failures() as error:
            if wait_s is None:
                log.warning("cannot read %s: %s: %s", path, type(error).__name__, error)
                return otherwise
        time.sleep(wait_s)
    raise AssertionError("the last try returns")
