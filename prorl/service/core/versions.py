"""The policy versions of a run: ids of weights, which of them serve, and who hears of it."""

from __future__ import annotations

from collections.abc import Iterable

from prorl.control import ControlRow, VersionPublished
from prorl.errors import ConflictError
from prorl.service.core.changes import CorePart
from prorl.service.core.state import RunRecord
from prorl.service.log import log_schema as sql
from prorl.types import RunWeights


class Versions(CorePart):
    def give(self, run: RunRecord, version: int, path: str) -> int:
        """An id for the weights in `path`: `version`, or the next one for 0. The same id and path
        again change nothing. Raises ConflictError for an id that was used for something else, or
        that is not the next.
        """
        version = version or run.weights.allocated_version + 1
        if version <= run.weights.allocated_version:
            rows = self._log.read(
                "SELECT note FROM versions WHERE run_id = ? AND version = ?", (run.run_id, version)
            )
            if not rows or rows[0][0] != path:
                raise ConflictError(
                    f"version {version} of run {run.run_id!r} is used",
                    f"{run.weights.allocated_version + 1}",
                    "an id is never used again",
                )
            return version
        if version != run.weights.allocated_version + 1:
            raise ConflictError(
                f"version {version} of run {run.run_id!r}",
                f"{run.weights.allocated_version + 1}, one above the last",
            )
        run.weights.allocated_version = version
        self._changes.mark_run(run)
        self._changes.insert(sql.INSERT_VERSION, (run.run_id, version, path, self._wall()))
        return version

    def publish(self, run: RunRecord, version: int) -> bool:
        """A given version serves: every worker hears of it. False when it was published before."""
        if version <= run.weights.version:
            return False
        run.weights.version = version
        self._changes.mark_run(run)
        self._changes.insert(sql.PUBLISH_VERSION, (1, run.run_id, version))
        self._tell(run)
        return True

    def mark_loaded(self, run: RunRecord) -> None:
        """The service gives servers the run's weights."""
        run.weights.published = True

    def mark_announced(self, run: RunRecord) -> None:
        """The run's trainer gives servers its weights itself."""
        run.weights.announced = True

    def start_with(self, run: RunRecord, labels: Iterable[str]) -> None:
        """Notes what servers called their weights when the run began: its version 0."""
        named = {label.rpartition(":")[0] for label in labels if label.count(":") > 1}
        run.weights.start = tuple(sorted(named))
        if run.weights.start:
            note = " ".join(run.weights.start)
            self._changes.insert(sql.INSERT_VERSION, (run.run_id, 0, note, self._wall()))
        self._tell(run)

    def _tell(self, run: RunRecord) -> None:
        for worker in self._state.workers.values():
            self._changes.send(worker, version_row(run))


def version_row(run: RunRecord) -> ControlRow:
    """Returns what workers hear of the weights of a run."""
    weights = RunWeights(run.tag, run.weights.start, run.weights.published, run.weights.announced)
    return ControlRow.of(
        VersionPublished(version=run.weights.version, weights=weights), run_id=run.run_id
    )
