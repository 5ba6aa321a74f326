"""Tests on hosts of their own: skipped, with the reason, where they cannot be made."""

from __future__ import annotations

import pytest

from tests.cluster.namespace_hosts import why_not

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")

REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.cluster)
            if REASON:
                item.add_marker(pytest.mark.skip(reason=REASON))
