"""Arrow Flight between processes: channels, edges over them, the worker's control client.

    FlightNetwork, LocalNetwork   listen and dial channels, between processes or inside one loop
                                  (`prorl.protocols.Network`)
    FlightReads                   what a listener answers beside channels: do_get,
                                  get_flight_info, do_action
    Outlet                        producer's side of an edge: `put(row)`, or
                                  `on_credit(free_rows)` and `send(rows)` for a supplier that
                                  makes rows on demand; `on_acked(keys)`, `on_lost(keys)`,
                                  `on_sent(keys, hello)`, `drop(key)`
    Inlet                         consumer's side: `set_upstreams(locations)`, `take()`,
                                  `done(key)`, `ack(keys)`, `stop()`
    ControlClient, Identity       worker's side of the control protocol: `emit`, `request`,
                                  handlers for commands
    tune                          malloc settings for processes that serve or read Flight

The arithmetic of edges is pure and lives in `credit.py`; tickets of the trainers' stream in
`ticket.py`.
"""

from prorl.flight.control_client import ControlClient, Identity
from prorl.flight.inlet import Inlet
from prorl.flight.local import LocalNetwork
from prorl.flight.malloc import tune
from prorl.flight.outlet import Outlet
from prorl.flight.rpc import FlightReads
from prorl.flight.server import FlightNetwork

__all__ = [
    "ControlClient",
    "FlightNetwork",
    "FlightReads",
    "Identity",
    "Inlet",
    "LocalNetwork",
    "Outlet",
    "tune",
]
