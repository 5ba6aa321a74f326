"""A kind whose sandboxes are on another host: a user's entry point, a process there, TLS and a key
that is good for one life.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.tools import bundle
from prorl.types import FailureCode, SandboxSpec
from tests.cluster.hosts import Hosts, hosts
from tests.sandbox.conftest import end, start_daemon
from tests.user_package import installed
from tests.waiting import until

KIND = """
    import json, secrets, socket, subprocess

    from prorl.sandbox.kind import SandboxKind
    from prorl.sandbox.kinds.relay import machine_config, relay

    def launch(launch, listener_fd, status_fd, serve):
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                 "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=pod",
                 "-keyout", "-", "-out", "-"]
        pem = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        secret = secrets.token_hex(32)
        with socket.socket(socket.AF_UNIX) as cloud:
            cloud.connect("@CLOUD@")
            cloud.sendall(json.dumps(machine_config(launch, pem, secret)).encode() + b"\\n")
            host, port = cloud.makefile().readline().split()
        relay(listener_fd, status_fd, (host, int(port)), pem, secret)

    KIND = SandboxKind(launch=launch, fix="", folder=False, zipapp=False, images=False,
                server_can_be_killed=True, enforces=(), cannot=(), bare="")
"""
PYTHON = shutil.which("python3", path="/usr/bin:/bin") or ""
"""The machine's own: another uid could not read one in root's home."""
CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from prorl.tools.server.remote import main; main()"
)


class Cloud(socketserver.ThreadingUnixStreamServer):
    """Starts a machine on a host for whoever asks; it is nobody's child but the test's."""

    def __init__(self, path: str, on: Hosts, server: str) -> None:
        super().__init__(path, _Asked)
        self.on, self.server = on, server
        self.machine_configs: list[dict[str, object]] = []
        self.ports: list[int] = []
        self.machines: list[subprocess.Popen[bytes]] = []


class _Asked(socketserver.StreamRequestHandler):
    server: Cloud

    def handle(self) -> None:
        cloud, line = self.server, self.rfile.readline()
        inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        argv = cloud.on.argv(2, *inside, PYTHON, "-S", "-c", CODE, cloud.server)
        machine = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert machine.stdin
        assert machine.stdout
        machine.stdin.write(line)
        machine.stdin.flush()
        cloud.machines.append(machine)
        port = machine.stdout.readline().decode().strip()
        cloud.machine_configs.append(json.loads(line))
        cloud.ports.append(int(port))
        self.wfile.write(f"{cloud.on.address(2)} {port}\n".encode())


@contextmanager
def cloud(on: Hosts, folder: Path) -> Iterator[Cloud]:
    server = folder / "server.pyz"
    server.write_bytes(bundle.build())
    with Cloud(str(folder / "cloud"), on, str(server)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
            for machine in made.machines:
                machine.kill()
                with machine:
                    pass


@pytest.mark.skipif(not PYTHON, reason="the machine needs a Python that all may read")
async def test_a_sandbox_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="prorl-t-", dir="/tmp") as name, hosts(2) as on:
        folder = Path(name)
        folder.chmod(0o711)
        files = {"pods.py": KIND.replace("@CLOUD@", f"{name}/cloud")}
        points = {"prorl.sandbox_kinds": {"pod": "pods:KIND"}}
        with (
            cloud(on, folder) as here,
            installed(tmp_path, "pods", files, points, monkeypatch),
        ):
            daemon = await start_daemon("pod", folder, prefix=on.argv(1))
            ref = await daemon.host.start("run/1/1", "run", SandboxSpec())
            async with daemon.host.connect(ref) as one, daemon.host.connect(ref) as two:
                command = "id -u; x=7; cat /sys/class/net/eth0/address /proc/net/fib_trie"
                said = (await one.call("bash", {"command": command}, 20.0)).output
                assert said.startswith("1000\n")
                assert on.address(2) in said
                assert (await two.call("bash", {"command": "echo $x"}, 20.0)).output == "7\n"
                await one.put("big", bytes(3 << 20))
                assert len(await one.get("big", 4 << 20)) == 3 << 20
                hostile = "kill -9 1; cat /proc/1/environ; ls /proc/1/fd; cat /tmp/prorl-*/pem"
                assert (await one.call("bash", {"command": hostile}, 20.0)).exit_code != 0
            await asyncio.to_thread(strangers_get_nothing, on, here)
            await daemon.host.stop(ref)
            assert await asyncio.to_thread(here.machines[-1].wait, 60) is not None

            await daemon.host.start("run/2/1", "run", SandboxSpec())
            daemon.process.send_signal(signal.SIGKILL)
            await daemon.process.wait()
            await daemon.host.close()
            await until(lambda: not on.pids(), "nothing runs there")

            daemon = await start_daemon("pod", folder, prefix=on.argv(1))
            for owner, code in (("3/1", "SANDBOX_LOST"), ("4/1", "SANDBOX_BROKEN")):
                ref = await daemon.host.start(f"run/{owner}", "run", SandboxSpec())
                async with daemon.host.connect(ref) as sandbox:
                    command = "kill -9 -1; sleep 60" if code == "SANDBOX_BROKEN" else "sleep 60"
                    call = asyncio.create_task(sandbox.call("bash", {"command": command}, 90.0))
                    if code == "SANDBOX_LOST":
                        here.machines[-1].kill()
                    with pytest.raises(SandboxError) as caught:
                        await call
                    assert caught.value.code is FailureCode[code]
            await end(daemon)


def strangers_get_nothing(on: Hosts, here: Cloud) -> None:
    """Neither by plain TCP, nor with another secret, nor with the right one: its lease is taken."""
    secret = str(here.machine_configs[-1]["secret"]).encode()
    for first in (None, b"guess call\n", b"guess lease\n", b" call\n", secret + b" lease\n"):
        assert said_to(on, here.ports[-1], first) == b""


def said_to(on: Hosts, port: int, first: bytes | None) -> bytes:
    code = (
        "import socket, ssl, sys\n"
        "line = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)\n"
        "context = ssl._create_unverified_context()\n"
        "first = sys.stdin.buffer.read()\n"
        "line = context.wrap_socket(line) if first else line\n"
        "line.sendall(first or b'hello\\n' * 2)\n"
        "try: sys.stdout.buffer.write(line.recv(100))\n"
        "except OSError: pass\n"
    )
    argv = on.argv(1, sys.executable, "-c", code, on.address(2), str(port))
    return subprocess.run(argv, input=first or b"", capture_output=True, check=True).stdout
