"""Arrow Flight between processes: channels, edges over them, the worker's control client.

Channels (`FlightNetwork`, inside one loop those of `local.py`) carry edges (`Outlet`, `Inlet`) and
control streams (`ControlClient`). The arithmetic of edges is pure and lives in `credit.py`; tickets
of the trainers' stream in `ticket.py`.
"""

from prorl.flight.control_client import ControlClient, this_incarnation
from prorl.flight.inlet import Inlet
from prorl.flight.malloc import tune
from prorl.flight.outlet import Outlet
from prorl.flight.rpc import FlightReads
from prorl.flight.server import FlightNetwork

__all__ = [
    "ControlClient",
    "FlightNetwork",
    "FlightReads",
    "Inlet",
    "Outlet",
    "this_incarnation",
    "tune",
]
