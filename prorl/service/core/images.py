"""Matches rollouts with nodes by the image, or the guest, that a rollout needs.

A task names an image of the node's registry (`data.image`; an absolute path is on a file system
that all share, and asks for nothing). Nodes of other hosts say what they have when they come: no
lease goes to one that lacks the image, or has another one under that name than the node that came
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from prorl import exact_json
from prorl.service.core.state import GroupRecord, State, WorkerRecord


def digests(images: Iterable[str] | None) -> Mapping[str, str] | None:
    """Digests by name, from what a hello says.

    >>> digests(["py=sha256:ab"]), digests(None)
    ({'py': 'sha256:ab'}, None)
    """
    if images is None:
        return None
    pairs = (image.partition("=") for image in images)
    return {name: digest for name, _, digest in pairs}


def image_of(group: GroupRecord) -> str:
    return _named(group.task) if '"image"' in group.task else ""


@lru_cache(maxsize=256)
def _named(task: str) -> str:
    data = exact_json.loads(task).get("data") or {}
    named = data.get("image") if isinstance(data, dict) else ""
    return named if isinstance(named, str) and "/" not in named else ""


def guest_of(group: GroupRecord) -> str:
    """The name of the guest from elsewhere that plays a group's rollouts; empty: none does."""
    return _guest(group.task) if group.env == "guest" and '"guest"' in group.task else ""


@lru_cache(maxsize=256)
def _guest(task: str) -> str:
    data = exact_json.loads(task).get("data") or {}
    data = data if isinstance(data, dict) and not data.get("argv") else {}
    return name if isinstance(name := data.get("guest"), str) else ""


def waiting_for_guests(state: State, run_id: str) -> Mapping[str, int]:
    """Returns how many rollouts of a run wait for which guest, as its RUN workers said last."""
    waiting: Counter[str] = Counter()
    for worker in state.workers.values():
        for stats in worker.status.stats.values():
            waiting.update(stats.waits_for.get(run_id, {}))
    return waiting


def has_image(state: State, worker: WorkerRecord | None, image: str) -> bool:
    if worker is None or worker.images is None:
        return True
    image_ids = (w.images[image] for w in state.workers.values() if w.images and image in w.images)
    return worker.images.get(image, "") == next(image_ids, None)


def nobody_has(state: State, image: str) -> bool:
    there = state.of_role("init")
    return bool(there) and not any(has_image(state, worker, image) for worker in there)
