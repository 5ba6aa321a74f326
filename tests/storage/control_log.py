"""A control log for writer tests: what the gateway promises a store, in one object, kept in a file
so that it outlives a SIGKILL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from prorl.control import Kind
from prorl.errors import FencedError
from prorl.flight.edge import NO_KEY
from prorl.types import AttemptKey, Json

Hook = Callable[[str], None]


class FileLog:
    """Obeys `prorl.storage.writer.ControlPort`; every effect is on disk before its reply."""

    def __init__(self, path: Path, hook: Hook = lambda step: None) -> None:
        self._path, self._hook = path, hook
        self.events: list[tuple[Kind, AttemptKey, str]] = []
        self.requests: list[Kind] = []
        self.state: dict[str, Any] = {
            "attempts": {},
            "committed": {},
            "terminals": {},
            "parts": [],
            "events": [],
            "tasks": [],
        }
        if path.exists():
            self.state = orjson.loads(path.read_bytes())

    def accept(self, *attempts: tuple[int, int]) -> None:
        """Current attempts: others are fenced."""
        self.state["attempts"] |= {str(rollout): attempt for rollout, attempt in attempts}
        self._save()

    def end(self, *terminals: dict[str, object]) -> None:
        """Rollouts that ended without a trajectory, not stored yet."""
        self.state["terminals"] |= {str(terminal["rollout_id"]): terminal for terminal in terminals}
        self._save()

    def say(self, table: str, *rows: dict[str, object]) -> None:
        """TASKS or GROUPS (`events`) rows, not stored yet."""
        self.state[table] += rows
        self._save()

    def unpublish(self, commit_seq: int) -> None:
        """As if the store had died between commit and publication."""
        self.state["parts"][commit_seq - 1]["published"] = False
        self._save()

    def snapshot(self) -> dict[str, Json]:
        """As the gateway sends it on `hello`."""
        parts = self.state["parts"]
        return {
            "run_id": "demo",
            "parts": [part["part"] for part in parts],
            "unpublished": [
                {name: part[name] for name in ("commit_seq", "part", "files")}
                for part in parts
                if not part["published"]
            ],
            "terminals": list(self.state["terminals"].values()),
            "tasks": self.state["tasks"],
            "group_events": self.state["events"],
        }

    def emit(
        self,
        kind: Kind,
        key: AttemptKey = NO_KEY,
        *,
        stage: str = "",
        code: str = "",
        payload: Json = None,
    ) -> None:
        self.events.append((kind, key, code))

    async def request(self, kind: Kind, *, run_id: str = "", payload: Json) -> Json:
        self._hook(f"{kind}.before")
        self.requests.append(kind)
        answer = getattr(self, f"_{kind}")(payload)
        self._save()
        self._hook(f"{kind}.after")
        return answer

    def _reserve(self, payload: Json) -> Json:
        refused = [
            [*key, reason] for key in payload["attempts"] if (reason := self._refusal(*key[1:]))
        ]
        gone = [key[:3] for key in refused]
        return {
            "granted": [key for key in payload["attempts"] if key not in gone],
            "refused": refused,
        }

    def _refusal(self, rollout_id: int, attempt: int) -> str:
        if self.state["attempts"].get(str(rollout_id)) != attempt:
            return "fenced"
        return "committed" if str(rollout_id) in self.state["committed"] else ""

    def _commit(self, payload: Json) -> Json:
        known = [part for part in self.state["parts"] if part["part"] == payload["part"]]
        if known:
            return {"commit_seq": known[0]["commit_seq"]}
        if any(self._refusal(row["rollout_id"], row["attempt"]) for row in payload["rollouts"]):
            raise FencedError("superseded")
        if any(
            str(rollout_id) not in self.state["terminals"] for rollout_id in payload["terminals"]
        ):
            raise FencedError("terminal is stored")
        for row in payload["rollouts"]:
            self.state["committed"][str(row["rollout_id"])] = row["attempt"]
        for rollout_id in payload["terminals"]:
            del self.state["terminals"][str(rollout_id)]
        self.state["events"] = [
            row for row in self.state["events"] if row["event_seq"] >= payload["group_events_upto"]
        ]
        self.state["tasks"] = [
            row for row in self.state["tasks"] if row["group_id"] >= payload["tasks_upto"]
        ]
        commit_seq = len(self.state["parts"]) + 1
        part = {
            "commit_seq": commit_seq,
            "part": payload["part"],
            "files": payload["files"],
            "published": False,
        }
        self.state["parts"].append(part)
        return {"commit_seq": commit_seq}

    def _published(self, payload: Json) -> Json:
        self.state["parts"][payload["commit_seq"] - 1]["published"] = True
        return {}

    def _save(self) -> None:
        temp = self._path.with_suffix(".new")
        temp.write_bytes(orjson.dumps(self.state))
        os.replace(temp, self._path)
