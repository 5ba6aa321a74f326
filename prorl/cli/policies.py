"""What `--policy` takes, and the backend that it means."""

from __future__ import annotations

from pathlib import Path

from prorl.backends.catalogue import (
    CATALOGUE,
    embedded,
    examples,
    is_known,
    scheme_of,
)
from prorl.backends.embedded import TOY
from prorl.cli.usage import nearest
from prorl.errors import ConfigError

POLICIES = {
    policy: f"{name}:{policy}" for name, scheme in CATALOGUE.items() for policy in scheme.policies
}
"""Policies with a name of their own -> backend; else `toy`, a checkpoint's directory, or the URL of
a backend.
"""


FAULTS = "error=0.1&nan=0.05&delay_s=0.02"
"""What `--policy faulty` means when it names no faults of its own."""


def backend(policy: str) -> str:
    """A policy as the service names its backend. Raises ConfigError with the nearest policy."""
    if policy == "toy":
        return embedded(str(TOY))
    if (Path(policy) / "config.json").exists():
        return embedded(str(Path(policy).absolute()))
    if policy == "faulty":
        return f"{POLICIES[policy]}?{FAULTS}"
    name, question, parameters = policy.partition("?")
    url = f"{POLICIES.get(name, name)}{question}{parameters}"
    if is_known(url) and _is_listed(url):
        return url
    hint = nearest(name.rpartition(":")[2], (*POLICIES, "toy"))
    if scheme_of(url) and not is_known(url):
        given = f"policy {policy!r} of the unknown scheme {scheme_of(url)!r}"
        raise ConfigError(given, f"one of {examples()}", hint)
    expected = (
        f"one of {', '.join(POLICIES)}, toy, a checkpoint's directory, or http://HOST:PORT of a"
        " model server"
    )
    raise ConfigError(f"policy {policy!r}", expected, hint)


def _is_listed(url: str) -> bool:
    """Whether a scheme that lists its policies has the URL's."""
    scheme = CATALOGUE.get(scheme_of(url))
    return not (scheme and scheme.policies) or url.partition("?")[0] in POLICIES.values()
