"""`prorl bench proxy`: CPU of the network's proxy for what sandboxes reach through it.

Programs in sandboxes (pyns, else apptainer) ask a server of this process by the proxy, each no more
often than the proxy lets it. Counted is the CPU of the proxy's process, which the kernel gives in
ticks of 10 ms. Rows: `cpu_ms_per_tunnel`, a CONNECT with one request in it (bar: at most 2);
`cpu_ms_per_request`, a plain GET; `cpu_ms_per_mib`, of one large answer.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from prorl.bench.report import Figure, Report, verdict
from prorl.linux import procfs
from prorl.sandbox.client import ConnectedSandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.node.probe import choose
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec

BAR_MS = 2.0
ADDRESS = "127.0.0.2"
"""The address of the server: loopback by an address that no program takes for its own."""
REQUESTS = 200
"""The requests of one sandbox: what it may begin at once."""
LARGE_MIB = 256
ASK = """
import socket, sys
target, head, count = sys.argv[1:]
for _ in range(int(count)):
    with socket.create_connection(("127.0.0.1", 3128)) as s:
        s.sendall(head.replace("|", "\\r\\n").encode())
        if head.startswith("CONNECT"):
            assert b" 200 " in s.recv(4096)
            s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        while s.recv(1 << 20):
            pass
"""


async def run(quick: bool) -> Report:
    num_boxes, large_mib = (2, 16) if quick else (8, LARGE_MIB)
    kind = await choose("auto")
    async with await asyncio.start_server(_answer, ADDRESS, 0) as server, AsyncExitStack() as stack:
        port = server.sockets[0].getsockname()[1]
        network = {"mode": "public", "mirrors": [[ADDRESS, port]]}
        host, _ = await stack.enter_async_context(spawned(kind, network=network))
        at = f"{ADDRESS}:{port}"
        tunnel, plain = f"CONNECT {at} HTTP/1.1|Host: x||", f"GET http://{at}/ HTTP/1.1|Host: x||"
        large = f"GET http://{at}/{large_mib} HTTP/1.1|Host: x||"
        count = num_boxes * REQUESTS
        rows = [
            await _row("cpu_ms_per_tunnel", host, num_boxes, tunnel, REQUESTS, count),
            await _row("cpu_ms_per_request", host, num_boxes, plain, REQUESTS, count),
            await _row("cpu_ms_per_mib", host, 1, large, 1, large_mib),
        ]
    return Report(bench="proxy", rows=tuple(rows))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """`/` is answered shortly, `/N` with so many MiB."""
    path = (await reader.readline()).split()[1]
    await reader.readuntil(b"\r\n")
    writer.write(b"HTTP/1.0 200 OK\r\n\r\nok")
    for _ in range(int(path[1:] or 0)):
        writer.write(bytes(1 << 20))
        await writer.drain()
    writer.close()


async def _row(
    name: str, host: UnixSandboxHost, num_boxes: int, head: str, each: int, units: int
) -> Figure:
    """CPU of the proxy, in fresh sandboxes, which all have their whole burst."""
    spec = SandboxSpec(network_mode="public")
    async with AsyncExitStack() as stack:
        boxes: list[ConnectedSandbox] = []
        for number in range(num_boxes):
            ref = await host.start(f"bench/{name}-{number}/1", "run", spec)
            stack.push_async_callback(host.stop, ref)
            boxes.append(await stack.enter_async_context(host.connect(ref)))
        pid = int((await host.status())["proxy_pid"])
        before_s = procfs.cpu_s(pid)
        argv = ["python3", "-c", ASK, "", head, str(each)]
        results = await asyncio.gather(*(box.exec(argv, 300.0) for box in boxes))
        assert not any(result.exit_code for result in results), results[0].output
        cpu_s = procfs.cpu_s(pid) - before_s
    value = cpu_s * 1e3 / units
    note = f"{units} by {num_boxes} sandboxes"
    note += f"; {verdict(value, BAR_MS)}" if name == "cpu_ms_per_tunnel" else ""
    return Figure(name=name, value=value, unit="ms", cpu_s=cpu_s, note=note)
