"""The access table against the routes that exist, and each of its cells."""

from __future__ import annotations

import itertools

import pytest

from prorl.access import FLIGHT, HTTP, check_flight, check_http
from prorl.errors import ForbiddenError
from prorl.tls import ROLES


def path_of(what: str) -> tuple[str, str]:
    method, _, path = what.partition(" ")
    return method, path.replace("{", "").replace("}", "")


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
