"""The rows of `prorl bench stream`: what its rounds say, beside their rivals and bars."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from prorl.bench.report import Figure, median
from prorl.bench.stream_shape import COMMAND, SHAPE, SHORT
from prorl.types import Json


@dataclass(slots=True)
class Rounds:
    """What a path's consumer said in its rounds, the warm-up left out."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    num_tokens: int = 0
    checksum: int = 0
    more: list[dict[str, float]] = field(default_factory=list)

    def add(self, said: dict[str, Json]) -> None:
        """Add the figures of one round."""
        self.seconds.append(said["seconds"])
        self.cpu_s.append(said["cpu_s"])
        self.more.append(said["more"])
        self.peak_mib, self.num_tokens, self.checksum = (
            said["peak_mib"],
            said["num_tokens"],
            said["checksum"],
        )

    @property
    def median_s(self) -> float:
        """Median seconds of the rounds."""
        return statistics.median(self.seconds)


def rows(found: dict[str, Rounds]) -> list[Figure]:
    """The rows of the report, in the order of the bars."""
    received, socket, tensors = found["received"], found["socket"], found["tensors"]
    payload = socket.more[-1]["bytes"]
    read = "bar 0.5; into tensors, every byte read"
    return [
        _bytes_per_token(received),
        _rate("received_vs_socket", received, socket, payload, "bar 0.7; batches in memory"),
        _rate("tensors_vs_socket", tensors, socket, payload, read),
        *(_times(name, tensors, found[rival], rival, bar) for name, rival, bar in _FORMATS),
        Figure(
            what="vs_transferqueue",
            value=tensors.median_s * 1e3,
            unit="ms",
            rival="TransferQueue",
            note="bar 2; not measured: it brings Ray and is not an extra of ours",
        ),
        _first_batch(found["first_batch"]),
        _mapped(found["mapped"]),
        *(_peak(name, rounds) for name, rounds in found.items() if name != "first_batch"),
    ]


def _bytes_per_token(received: Rounds) -> Figure:
    each = [more["wire_bytes"] / received.num_tokens for more in received.more]
    bar = 4 + 4 * SHAPE.sampled_share + 0.25
    note = f"bar {bar:g}; TCP bytes as the kernel counts them"
    return median("bytes_per_token", each, "B/token", note=note)


def _first_batch(first: Rounds) -> Figure:
    short_ms = statistics.median(more["short_s"] for more in first.more) * 1e3
    note = f"bar 1.5 times that at {SHORT}: {first.median_s * 1e3 / short_ms:.2f}"
    row = median("same_host_first_batch_ms", _ms(first.seconds), "ms", note=note)
    return row.beside("64 trajectories", short_ms, f"{COMMAND} first_batch")


def _mapped(mapped: Rounds) -> Figure:
    """Mapped anew each round, so that no page is there yet."""
    gigabytes = mapped.more[-1]["bytes"] / 1e9
    memcpy_s = statistics.median(more["memcpy_s"] for more in mapped.more)
    row = Figure(
        what="same_host_read_vs_memcpy",
        value=gigabytes / mapped.median_s,
        unit="GB/s",
        repeats=tuple(gigabytes / s for s in mapped.seconds),
        cpu_s=statistics.median(mapped.cpu_s),
        note="bar 0.4; mapped anew each round, every byte read",
    )
    rival = gigabytes / memcpy_s
    return row.beside("memcpy, warm", rival, f"{COMMAND} mapped", more_is_better=True)


_FORMATS = (
    ("vs_json_lists", "json_lists", 50),
    ("vs_pickled_lists", "pickled_lists", 30),
    ("vs_dataproto", "dataproto", 10),
)


def _rate(what: str, ours: Rounds, socket: Rounds, payload: float, note: str) -> Figure:
    row = Figure(
        what=what,
        value=payload / ours.median_s / 1e9,
        unit="GB/s",
        repeats=tuple(payload / s / 1e9 for s in ours.seconds),
        cpu_s=statistics.median(ours.cpu_s),
        note=note,
    )
    rival = payload / socket.median_s / 1e9
    return row.beside("raw socket", rival, f"{COMMAND} socket", more_is_better=True)


def _times(what: str, ours: Rounds, rival: Rounds, name: str, bar: int) -> Figure:
    cpu_s = statistics.median(ours.cpu_s)
    row = median(what, _ms(ours.seconds), "ms", cpu_s=cpu_s, note=f"bar {bar}")
    return row.beside(name, rival.median_s * 1e3, f"{COMMAND} {name}")


def _peak(name: str, rounds: Rounds) -> Figure:
    return Figure(
        what=f"peak_memory_{name}",
        value=rounds.peak_mib,
        unit="MiB",
        note="growth of the consumer's resident size over all rounds",
    )


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(s * 1e3 for s in seconds)
