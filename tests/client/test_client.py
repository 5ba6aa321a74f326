"""The HTTP side of the client against a real gateway, answers lost on the way included."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.client import Client, connect
from prorl.config import ServiceConfig, StoreConfig
from prorl.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from prorl.net.bearer import signing_key
from prorl.types import SamplingParams, Task

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A gateway without workers, on a root of its own, with the files that a supervisor writes."""
    root = tmp_path_factory.mktemp("root")
    with tempfile.TemporaryDirectory(prefix="prorl-t-") as sockets:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = ServiceConfig(
            root=root,
            http_port=port,
            socket_dir=Path(sockets),
            token=TOKEN,
            backends=("scripted:oracle",),
            workers="nodes",
            store=StoreConfig(own_process=True),
        )
        signing_key(root)
        (root / "service.json").write_text(config.model_dump_json())
        module = "prorl.deploy.service"
        command = [sys.executable, "-m", module, "--config", str(root / "service.json")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready "), "the gateway did not start"
            yield root
            process.terminate()


@pytest.fixture
def url(root: Path) -> str:
    return f"http://127.0.0.1:{json.loads((root / 'service.json').read_text())['http_port']}"


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    with connect(root) as client:
        yield client


def tasks(num: int) -> list[Task]:
    return [
        Task(task_id=f"t{i}", env="math", prompt=f"What is {i} + 1?", data={"answer": str(i + 1)})
        for i in range(num)
    ]


@pytest.mark.parametrize("place", ["s3://bucket/p", Path("s3://bucket/p"), "file:///a"])
def test_a_store_is_no_service(place: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"a store \((s3|file)://\), where no service listens"):
        connect(place)


def test_a_run_from_creation_to_cancel(client: Client, tmp_path: Path) -> None:
    made = client.create_run(run_id="life", seed=3)
    assert made["run_id"] == "life"
    assert client.create_run(run_id="life", seed=3)["run_id"] == "life"
    with pytest.raises(ConflictError):
        client.create_run(run_id="life", seed=4)
    accepted = client.submit(
        "life", tasks(3), n=2, sampling=SamplingParams(temperature=0.7), extra={"set": "train"}
    )
    assert [group["n"] for group in accepted] == [2, 2, 2]
    assert client.run("life")["groups"]["open"] == 3
    assert any(run["run_id"] == "life" for run in client.status()["runs"])
    weights = tmp_path / "weights"
    with pytest.raises(UserError, match="no such directory here"):
        client.publish("life", 1, weights)
    weights.mkdir()
    client.publish("life", 1, weights)
    client.publish("life", 1, weights)
    assert client.run("life")["version"] == 1
    with pytest.raises(ConflictError):
        client.publish("life", 5, weights)
    with pytest.raises(UserError, match="no tasks; expected at least one"):
        client.submit("unknown", [])
    client.cancel("life")
    assert client.run("life")["counts"]["cancelled"] == 6


def test_a_key_names_a_submission(client: Client) -> None:
    client.create_run(run_id="keys")
    first = client.submit("keys", tasks(4), n=2, key="epoch-0")
    again = client.submit("keys", tasks(4), n=2, key="epoch-0")
    assert [group["group_id"] for group in again] == [group["group_id"] for group in first]
    assert not any(group["created"] for group in again)
    rest = client.submit("keys", tasks(6)[2:], n=2, key="epoch-0", first=2)
    assert [group["created"] for group in rest] == [False, False, True, True]
    with pytest.raises(ConflictError):
        client.submit("keys", tasks(4), n=3, key="epoch-0")
    client.submit("keys", tasks(4), n=2)
    assert client.run("keys")["groups"]["open"] == 10, (
        "without a key each call is a submission of its own"
    )


@contextlib.contextmanager
def losing_answers(url: str, num_lost: int) -> Iterator[str]:
    """A proxy that passes each request on and drops the first answers after the service has sent
    them.
    """
    port = int(url.rpartition(":")[2])
    num_to_lose = [num_lost]

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                inbound, _ = listener.accept()
            except OSError:
                return
            with inbound, socket.create_connection(("127.0.0.1", port)) as outbound:
                inbound.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    while data := inbound.recv(1 << 16):
                        outbound.sendall(data)
                answer = outbound.recv(1 << 20)
                if num_to_lose[0]:
                    num_to_lose[0] -= 1
                    continue
                inbound.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_lost_answer_duplicates_nothing(client: Client, url: str) -> None:
    client.create_run(run_id="lost")
    with losing_answers(url, 2) as proxy, connect(proxy, TOKEN) as unlucky:
        accepted = unlucky.submit("lost", tasks(3), n=2)
    assert not any(group["created"] for group in accepted), (
        "the service had them when the answer was lost"
    )
    assert client.run("lost")["groups"]["open"] == 3


def test_long_submissions_go_in_several_requests(client: Client) -> None:
    client.create_run(run_id="long")
    accepted = client.submit("long", (task for task in tasks(1100)), n=1, last=True)
    assert len({group["group_id"] for group in accepted}) == 1100
    assert client.run("long")["last"] is True
    with pytest.raises(UserError, match="load_tasks"):
        client.submit("long", "tasks.jsonl")  # type: ignore[arg-type]


def test_mistakes_are_reported_in_a_single_line(client: Client, url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        client.run("nope")
    with pytest.raises(UserError, match="seed"):
        client.create_run(run_id="bad", seed=-1)
    with pytest.raises(UserError, match="refused the token"):
        connect(url, "wrong").status()
    with pytest.raises(ConfigError, match="no service works on"):
        connect(tmp_path)
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        connect("http://")


def test_a_batch_that_could_never_fill_is_refused(client: Client) -> None:
    client.create_run(
        run_id="bounded", delivery="stream", max_uncommitted_groups=8, backends=["scripted:noop"]
    )
    with pytest.raises(UserError, match="larger max_uncommitted_groups"):
        client.stream("bounded", groups_per_batch=9)
    client.stream("bounded", groups_per_batch=8)


def test_the_token_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    assert "runs" in connect(url).status()


def test_a_service_that_starts_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    file.write_text('{"host": "127.0.0.1", "http_port": 0}')
    with (
        connect(tmp_path, retry_s=0.1) as client,
        pytest.raises(UnavailableError, match="does not listen yet"),
    ):
        client.status()


def test_tasks_that_ask_for_more_network_than_is_granted_are_noted_on_submission(
    client: Client,
) -> None:
    client.create_run(run_id="network", delivery="store")
    closed, *others = tasks(3)
    public = [replace(task, data={**task.data, "network": "public"}) for task in others]
    notes: list[str] = []
    client.on_note = notes.append
    client.submit("network", [closed, *public], n=1, key="k")
    client.submit("network", [closed], n=1, key="other")
    assert notes == [
        "2 of 3 tasks ask for more network (public) than service.sandbox.network grants"
        " (no-network), and get no more (t1, t2)"
    ]
