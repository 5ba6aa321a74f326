"""npm, git and apt reach a mirror from inside a sandbox by the proxy, as the operator's files say.

The mirror is a folder that a web server on an address of this machine shows: an npm registry of one
package, a repository of git, a Debian repository of one package.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prorl.types import SandboxSpec
from tests.sandbox.conftest import end, short_folder, start_daemon, why_not

APT = (
    "mkdir -p state/lists/partial cache/archives/partial && apt-get -o Dir::State=$PWD/state"
    " -o Dir::Cache=$PWD/cache -o Dir::State::status=/dev/null -o Dir::Etc::sourceparts=/etc/mirror"
    " -o Dir::Etc::sourcelist=/dev/null -o APT::Sandbox::User= -o Debug::NoLocking=1"
)
COMMANDS = {
    "npm": "npm install --no-audit --no-fund tiny && node -p \"require('tiny')\"",
    "git": "git clone -q MIRROR/own.git && cat own/file",
    "apt-get": f"{APT} update && {APT} download tiny && dpkg-deb -f tiny_1_all.deb Description",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder that is shown, and its URL."""
    folder = tmp_path_factory.mktemp("mirror")
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.2", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.2:{server.server_port}"
        server.shutdown()


def _fill(tool: str, folder: Path, url: str) -> dict[str, str]:
    """Make a tool's mirror; returns the text of the operator's files by their paths inside."""
    folder.mkdir(exist_ok=True)
    if list(folder.iterdir()):
        shutil.rmtree(folder)
        folder.mkdir()
    if tool == "npm":
        package = folder / "package"
        package.mkdir()
        (package / "package.json").write_text('{"name": "tiny", "version": "1.0.0"}')
        (package / "index.js").write_text("module.exports = 'from the mirror';")
        with tarfile.open(folder / "tiny.tgz", "w:gz") as archive:
            archive.add(package, "package")
        digest = hashlib.sha1((folder / "tiny.tgz").read_bytes()).hexdigest()
        tarball = {"tarball": f"{url}/tiny.tgz", "shasum": digest}
        version = {"name": "tiny", "version": "1.0.0", "dist": tarball}
        page = {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        (folder / "tiny").write_text(json.dumps(page))
        return {"/etc/npmrc": f"registry={url}\n"}
    if tool == "git":
        own = folder / "own.git"
        script = (
            f"git init -q work && cd work && echo from the mirror > file && git add . && git -c"
            f" user.name=a -c user.email=a@b.example commit -qm x && git clone -q --bare . {own}"
            f" && git -C {own} update-server-info"
        )
        subprocess.run(["bash", "-c", script], cwd=folder, check=True)
        return {"/etc/mirror/unused": ""}
    package = folder / "deb"
    (package / "DEBIAN").mkdir(parents=True)
    control = "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.example>\n"
    (package / "DEBIAN/control").write_text(f"{control}Description: from the mirror\n")
    built = folder / "tiny_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", package, built], check=True, capture_output=True)
    digest = hashlib.sha256(built.read_bytes()).hexdigest()
    listed = f"Filename: ./{built.name}\nSize: {built.stat().st_size}\nSHA256: {digest}\n"
    (folder / "Packages").write_text(f"{control}{listed}Description: from the mirror\n")
    return {"/etc/mirror/own.list": f"deb [trusted=yes] {url} ./\n"}


@pytest.mark.parametrize("kind", ["pyns", pytest.param("apptainer", marks=pytest.mark.apptainer)])
@pytest.mark.parametrize("tool", COMMANDS)
async def test_a_package_tool_reaches_the_mirror_that_the_operators_files_name(
    kind: str, tool: str, mirror: tuple[Path, str]
) -> None:
    if why_not(kind):
        pytest.skip(why_not(kind))
    if not shutil.which(tool):
        pytest.skip(f"no {tool}")
    folder, url = mirror
    command = COMMANDS[tool].replace("MIRROR", f"{url}/{tool}")
    with short_folder() as root, short_folder(0o755) as files_folder:
        texts = _fill(tool, folder / tool, f"{url}/{tool}")
        files = {str(files_folder / Path(target).name): target for target in texts}
        for path, target in files.items():
            Path(path).write_text(texts[target])
        network = {
            "mode": "public",
            "mirrors": [["127.0.0.2", int(url.rpartition(":")[2])]],
            "env": {"NPM_CONFIG_GLOBALCONFIG": "/etc/npmrc"},
            "files": files,
        }
        daemon = await start_daemon(kind, root, network=network)
        for number, mode in enumerate(("no-network", "public")):
            spec = SandboxSpec(network_mode=mode, address_bytes=1 << 40)
            ref = await daemon.host.start(f"r/{number}/1", "run", spec)
            async with daemon.host.connect(ref) as sandbox:
                outputs = [await sandbox.exec(["cat", path], 30.0) for path in files.values()]
                assert {each.exit_code == 0 for each in outputs} == {mode == "public"}
                if mode == "public":
                    done = await sandbox.call("bash", {"command": command}, 90.0)
                    assert "from the mirror" in done.output, done.output
        await end(daemon)
