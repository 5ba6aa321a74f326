"""Tests of what becomes of the attempts of a RUN worker's last incarnation after the gateway's
word.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from prorl.control import Claim
from prorl.envs import get_env
from prorl.journal import Journals
from prorl.stages.run import RunOperator
from prorl.testing import RENDERER
from tests.flight.work_rows import key
from tests.journal.journal_records import row
from tests.stages.recording_host import RecordingHost, as_host


async def test_who_is_adopted_goes_on_and_the_others_are_forgotten(tmp_path: Path) -> None:
    last = Journals(tmp_path)
    last.open()
    for number in range(3):
        last.begin(row(number))
    last.close()
    adoption = RunOperator(
        as_host(RecordingHost()),
        get_env,
        lambda spec: asyncio.sleep(0, RENDERER),
        is_cancelled=lambda key: False,
        emit=lambda *_, **__: None,
        journals=Journals(tmp_path),
    )
    await adoption.open()
    assert [claim.key for claim in adoption.claims()] == [key(0), key(1), key(2)]
    adopted = adoption.adopted([Claim(*key(0), 1)])
    assert [record.key for record in adopted] == [key(0)]
    await adoption.close()
    again = Journals(tmp_path)
    assert [record.key for record in again.open()] == [key(0)], (
        "the journals of the others have gone"
    )
    again.close()
