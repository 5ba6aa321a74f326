"""Drop-in servers: the HTTP of other rollout services, spoken by this one.

    client written for NeMo Gym or ProRL Agent --> routes --> Rollouts --> the service

A trainer that knows one of them changes an address. Each is a file with `routes(rollouts)`, all are
a client of the service like any other: what they ask for is stored, shown and queried as ever.
These protocols know no key, so `prorl serve --as` listens on this host alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SERVERS: Mapping[str, str] = MappingProxyType(
    {
        "nemo-gym": "prorl.dropin.nemo_gym",
        "prorl-agent": "prorl.dropin.prorl_agent",
    }
)
"""The protocols that can be spoken, and the module whose `routes` speak each."""
