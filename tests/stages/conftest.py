"""The networks of the flight tests, for stages."""

from tests.flight.conftest import Net, net, no_leaks

__all__ = ["Net", "net", "no_leaks"]
