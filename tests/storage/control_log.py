"""A control log for writer tests: what the gateway promises a store, in one object, kept in a file
so that it outlives a SIGKILL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from prorl.control import (
    CommitPart,
    Committed,
    Done,
    Kind,
    PartPublished,
    Payload,
    Refusal,
    RefusalReason,
    ReplyT,
    Request,
    Reserve,
    Reserved,
    Rows,
    RunNews,
    Terminal,
)
from prorl.errors import FencedError
from prorl.flight.credit import NO_KEY
from prorl.storage.write.writer import RunWriter
from prorl.types import AttemptKey, Json

Hook = Callable[[str], None]


def plain(record: object) -> Json:
    """A record as JSON values."""
    return msgspec.to_builtins(record)


class FileLog:
    """Obeys `prorl.storage.write.writer.ControlPort`; every effect is on disk before its reply."""

    def __init__(self, path: Path, hook: Hook = lambda step: None) -> None:
        self._path, self._hook = path, hook
        self.events: list[tuple[Kind, AttemptKey, str]] = []
        self.requests: list[Kind] = []
        self.state: dict[str, Any] = {
            "attempts": {},
            "committed": {},
            "terminals": {},
            "parts": [],
            "outbox": [],
            "seq": 0,
        }
        if path.exists():
            self.state = orjson.loads(path.read_bytes())

    def accept(self, *attempts: tuple[int, int]) -> None:
        """Current attempts: others are fenced."""
        self.state["attempts"] |= {str(rollout): attempt for rollout, attempt in attempts}
        self._save()

    def end(self, *terminals: Terminal) -> None:
        """Rollouts that ended without a trajectory, not stored yet."""
        for ended in terminals:
            self.state["terminals"] |= {str(ended.rollout_id): plain(ended)}
            self._tell("terminal", plain(ended))
        self._save()

    def say(self, rows: Rows) -> None:
        """New TASKS and GROUPS rows, not stored yet."""
        self._tell("rows", plain(rows))
        self._save()

    def _tell(self, kind: str, payload: Json) -> None:
        self.state["seq"] += 1
        self.state["outbox"].append({"seq": self.state["seq"], "kind": kind, "payload": payload})

    def tell(self, writer: RunWriter) -> None:
        """Tells the writer what the gateway tells a session, from the start of the outbox."""
        for row in self.state["outbox"]:
            if row["seq"] <= writer.outbox_seq:
                continue
            writer.outbox_seq = row["seq"]
            if row["kind"] == "rows":
                writer.add_rows(msgspec.convert(row["payload"], Rows))
            else:
                writer.add_terminal(msgspec.convert(row["payload"], Terminal))

    def unpublish(self, commit_seq: int) -> None:
        """Marks a part as if the store had died between commit and publication."""
        self.state["parts"][commit_seq - 1]["published"] = False
        self._save()

    def news(self) -> RunNews:
        """Returns the news that the gateway sends to a session, before the outbox."""
        parts = self.state["parts"]
        values = {
            "filter": "none",
            "delivery": "stream",
            "group_size": 1,
            "state": "open",
            "num_commits": len(parts),
            "unpublished": [
                {name: part[name] for name in ("commit_seq", "part", "files")}
                for part in parts
                if not part["published"]
            ],
        }
        return msgspec.convert(values, RunNews)

    def emit(
        self, payload: Payload, key: AttemptKey = NO_KEY, *, stage: str = "", code: str = ""
    ) -> None:
        self.events.append((payload.kind, key, code))

    async def request(self, request: Request[ReplyT], *, run_id: str = "") -> ReplyT:
        self._hook(f"{request.kind}.before")
        self.requests.append(request.kind)
        answer = getattr(self, f"_{request.kind}")(request)
        self._save()
        self._hook(f"{request.kind}.after")
        assert isinstance(answer, request.reply)
        return answer  # type: ignore[return-value]

    def _reserve(self, request: Reserve) -> Reserved:
        refused = tuple(
            Refusal(key, reason)
            for key in request.attempts
            if (reason := self._refusal(key.rollout_id, key.attempt))
        )
        refused_keys = {refusal.key for refusal in refused}
        return Reserved(
            granted=tuple(key for key in request.attempts if key not in refused_keys),
            refused=refused,
        )

    def _refusal(self, rollout_id: int, attempt: int) -> RefusalReason | None:
        if self.state["attempts"].get(str(rollout_id)) != attempt:
            return RefusalReason.FENCED
        return RefusalReason.COMMITTED if str(rollout_id) in self.state["committed"] else None

    def _commit(self, request: CommitPart) -> Committed:
        existing = [part for part in self.state["parts"] if part["part"] == request.part]
        if existing:
            return Committed(commit_seq=existing[0]["commit_seq"])
        if any(self._refusal(row.rollout_id, row.attempt) for row in request.rollouts):
            raise FencedError("superseded")
        if any(str(rollout_id) not in self.state["terminals"] for rollout_id in request.terminals):
            raise FencedError("terminal is stored")
        for row in request.rollouts:
            self.state["committed"][str(row.rollout_id)] = row.attempt
        for rollout_id in request.terminals:
            del self.state["terminals"][str(rollout_id)]
        self.state["outbox"] = [
            row for row in self.state["outbox"] if row["seq"] > request.outbox_upto
        ]
        commit_seq = len(self.state["parts"]) + 1
        part = {
            "commit_seq": commit_seq,
            "part": request.part,
            "files": plain(request.files),
            "published": False,
        }
        self.state["parts"].append(part)
        return Committed(commit_seq=commit_seq)

    def _published(self, request: PartPublished) -> Done:
        self.state["parts"][request.commit_seq - 1]["published"] = True
        return Done()

    def _save(self) -> None:
        temp = self._path.with_suffix(".new")
        temp.write_bytes(orjson.dumps(self.state))
        os.replace(temp, self._path)
