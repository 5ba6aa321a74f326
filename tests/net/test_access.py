"""The access table against the routes that exist, and each of its cells."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from prorl.errors import ForbiddenError
from prorl.net.access import FLIGHT, HTTP, check_flight, check_http
from prorl.net.tls import ROLES
from prorl.service.http.app import create_app
from tests.service.world import world


def path_of(what: str) -> tuple[str, str]:
    method, _, path = what.partition(" ")
    return method, path.replace("{", "").replace("}", "")


async def test_the_table_names_every_route(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        app = create_app(w.served.gateway)._app
    routes = {
        f"{method} {route.path}"
        for route in app.routes  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}
    }
    assert routes <= set(HTTP)


@pytest.mark.parametrize(("what", "role"), list(itertools.product(HTTP, ROLES)))
def test_http(what: str, role: str) -> None:
    if role in HTTP[what]:
        check_http(role, *path_of(what))
    else:
        with pytest.raises(ForbiddenError, match=f"as {role}"):
            check_http(role, *path_of(what))
    check_http(None, *path_of(what))


@pytest.mark.parametrize(("what", "role"), list(itertools.product(FLIGHT, ROLES)))
def test_flight(what: str, role: str) -> None:
    if role in FLIGHT[what]:
        check_flight(role, what)
    else:
        with pytest.raises(ForbiddenError, match=f"as {role}"):
            check_flight(role, what)
    check_flight(None, what)


@pytest.mark.parametrize("role", [*ROLES, "", "somebody"])
def test_what_the_table_does_not_name_is_for_nobody(role: str) -> None:
    for method, path in (("GET", "/v1/secrets"), ("PATCH", "/v1/runs"), ("GET", "/v1/runs/a/b/c")):
        with pytest.raises(ForbiddenError):
            check_http(role, method, path)
    with pytest.raises(ForbiddenError):
        check_flight(role, "exchange edge/ready")
