"""Where the service of a local root listens."""

from __future__ import annotations

import time
from pathlib import Path

import orjson

from prorl.errors import ConfigError, UnavailableError
from prorl.types import Json


def listening(root: Path, patience_s: float) -> dict[str, Json]:
    """What `service.json` of a root says, once its gateway listens: before that it has no port yet.

    Raises ConfigError when no service works on the root, UnavailableError when it is too slow.
    """
    until = time.monotonic() + patience_s
    while not (service := _service_file(root))["http_port"]:
        if time.monotonic() >= until:
            raise UnavailableError(f"the service of {root} does not listen yet")
        time.sleep(0.05)
    return service


def _service_file(root: Path) -> dict[str, Json]:
    try:
        return dict(orjson.loads((root / "service.json").read_bytes()))
    except FileNotFoundError:
        expected = "http://HOST:PORT, grpc://HOST:PORT, or the root directory of a running service"
        raise ConfigError(
            f"no service works on {root}", expected, "start one with `prorl serve`"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{root}/service.json: {error.strerror}",
            "a file that you can read",
            "pass the token and http:// address",
        ) from None
