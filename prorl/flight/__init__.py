"""Arrow Flight between processes: channels, the edge protocol, the control client."""

from prorl.flight.local import LocalNetwork
from prorl.flight.malloc import tune
from prorl.flight.server import FlightNetwork, FlightReads

__all__ = ["FlightNetwork", "FlightReads", "LocalNetwork", "tune"]
