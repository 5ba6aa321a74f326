"""Images from container registries, layouts and archives: right or refused, each layer once.

The registry is ours (`image_sources.py`) where it must misbehave; Debian's docker-registry, umoci
and Apptainer are referees where they are installed.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import random
import shutil
import ssl
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prorl.errors import ConflictError, NotFoundError, SandboxError, StorageError, UserError
from prorl.sandbox.images import remote
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Image, Registry
from prorl.sandbox.images.remote import source_of
from prorl.sandbox.images.stack import lookup, merge
from prorl.sandbox.images.tree import entries
from prorl.sandbox.images.unpack import OPAQUE, unpack
from prorl.sandbox.trees import remove_tree
from prorl.types import FailureCode
from tests.sandbox.image_sources import (
    BASE,
    Blobs,
    Entry,
    RegistryServer,
    archive,
    debians_registry,
    digest_of,
    folder,
    serving,
)

WIDE = 1 << 40


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with serving(Blobs()) as registry_server:
        yield registry_server


def seen(registry: Registry, image: Image, tmp_path: Path) -> Path:
    """Returns the image as a sandbox sees it, as a folder."""
    target = tmp_path / f"seen-{image.digest[:8]}"
    merge(registry.stack(image.digest)[::-1], target)
    return target


def listing(tree: Path) -> dict[str, tuple[object, ...]]:
    """Kind, mode, content or aim of everything in a folder; which names are one file."""
    listed: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path, about in sorted(entries(str(tree))):
        name, kind = os.path.relpath(path, tree), stat.S_IFMT(about.st_mode)
        content: object = ""
        if stat.S_ISREG(about.st_mode):
            content = (Path(path).read_bytes(), first.setdefault(about.st_ino, name))
        elif stat.S_ISLNK(about.st_mode):
            content = os.readlink(path)
        mode = 0 if stat.S_ISLNK(about.st_mode) else stat.S_IMODE(about.st_mode) & 0o1777
        listed[name] = (kind, mode, content)
    return listed


# ---- what an image says


SECOND = (
    Entry("lib/.wh.gone"),
    folder("old"),
    Entry(f"old/{OPAQUE}"),
    Entry("old/fresh", b"y", 0o600),
    Entry(".wh.etc"),
    Entry(".wh.again"),
    folder("again"),
    Entry("again/above", b"z"),
    folder("twice"),
    Entry("twice/above", b"z"),
    Entry(".wh.twice"),
    folder("opt"),
    Entry("opt/one", b"same", 0o755),
    Entry("opt/two", mode=0o755, kind=tarfile.LNKTYPE, link="opt/one"),
    Entry("suid", b"s", 0o4755),
    Entry("dev/sda", kind=tarfile.BLKTYPE),
    Entry("pipe", kind=tarfile.FIFOTYPE),
)
LAYERS = (
    archive(
        *BASE,
        folder("lib"),
        folder("lib/deep"),
        Entry("lib/deep/a", b"lower"),
        Entry("lib/gone", b"x"),
        folder("old"),
        Entry("old/hidden", b"x"),
        folder("etc/dir"),
        Entry("etc/dir/x", b"x"),
        folder("again"),
        Entry("again/below", b"x"),
        folder("twice"),
        Entry("twice/below", b"x"),
        Entry("link", kind=tarfile.SYMTYPE, link="/etc/hosts"),
        folder("tmp", 0o1777),
    ),
    archive(*SECOND),
    archive(folder("etc"), Entry("etc/group", b"g"), Entry("lib/deep/a", b"upper", 0o640)),
    *(archive(folder("n"), Entry(f"n/{number}", str(number).encode())) for number in range(9)),
)
"""Twelve: whiteouts, an opaque folder, links of both kinds, a device, a pipe, a setuid file."""


def test_twelve_layers_are_a_single_image(
    server: RegistryServer, registry: Registry, tmp_path: Path
) -> None:
    server.blobs.image("v1", *LAYERS, Env=["PATH=/opt:/bin", "A=it's"], WorkingDir="/opt")
    image = Pull(registry, {}).pull("twelve", f"docker://{server.host}/team/twelve:v1")
    tree = seen(registry, image, tmp_path)
    entries = listing(tree)
    assert not entries.keys() & {
        "lib/gone",
        "old/hidden",
        "etc/dir",
        "etc/dir/x",
        "dev/sda",
        "pipe",
    }
    for name in ("again", "twice"):  # taken away and made anew by one layer
        assert (f"{name}/above" in entries, f"{name}/below" in entries) == (True, False)
    assert entries["old/fresh"][1:] == (0o600, (b"y", "old/fresh"))
    assert entries["opt/two"] == entries["opt/one"]
    assert entries["suid"][1] == 0o755
    assert os.readlink(tree / "link") == "/etc/hosts"
    assert entries["lib/deep/a"][1:] == (0o640, (b"upper", "lib/deep/a"))
    assert entries["tmp"][1] == 0o1777
    assert (tree / "etc/hosts").read_bytes() == b""  # taken away below: it is a mount point only
    assert (tree / ".prorl-workdir").read_text() == "/opt\nroot\n"
    env_script = (tree / ".singularity.d/env/90-environment.sh").read_text()
    argv = ["bash", "-c", f'{env_script}\necho "$PATH $A"']
    out = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert out.stdout == "/opt:/bin it's\n"


def test_lookup_sees_what_the_merged_tree_has(registry: Registry, tmp_path: Path) -> None:
    layout = Blobs()
    layout.image("v1", *LAYERS)
    image = Pull(registry, {}).pull("twelve", f"oci:{layout.layout(tmp_path / 'oci')}:v1")
    if not image.layers:
        pytest.skip("this machine merges: nothing is looked up")
    tree = seen(registry, image, tmp_path)
    stack = registry.stack(image.digest)[::-1]
    for name in (*listing(tree), "lib/gone", "old/hidden", "etc/dir", "etc/dir/x", "bin/x/y"):
        about = lookup(stack, name)
        assert (about is not None) == os.path.lexists(tree / name), name


def test_a_merged_image_is_the_same_without_marks(registry: Registry, tmp_path: Path) -> None:
    layout = Blobs()
    layout.image("v1", *LAYERS)
    source = f"oci:{layout.layout(tmp_path / 'oci')}:v1"
    pulls = Pull(registry, {})
    stacked = listing(seen(registry, pulls.pull("one", source), tmp_path))
    pulls.stacks = False
    merged = pulls.pull("two", source)
    assert merged.layers == ()
    assert listing(Path(merged.path)) == stacked


def by_umoci(layout: Path, work: Path) -> Path:
    words = ["umoci", "unpack", "--image", f"{layout}:v1", str(work / "bundle")]
    subprocess.run(words, check=True)
    return work / "bundle" / "rootfs"


def by_podman(layout: Path, work: Path) -> Path:
    podman = ["podman", "--root", f"{work}/root", "--runroot", f"{work}/run"]
    podman += ["--storage-driver", "vfs"]
    run = partial(subprocess.run, check=True, capture_output=True, text=True, timeout=120)
    image = run([*podman, "pull", "-q", f"oci:{layout}:v1"]).stdout.strip()
    return Path(run([*podman, "image", "mount", image]).stdout.strip())


@pytest.mark.parametrize("referee", [by_umoci, by_podman])
@pytest.mark.skipif(os.getuid() != 0, reason="both make the device as root only")
def test_umoci_and_podman_unpack_the_same(
    registry: Registry, tmp_path: Path, place: Path, referee: Callable[[Path, Path], Path]
) -> None:
    program = referee.__name__.removeprefix("by_")
    if not shutil.which(program):
        pytest.skip(f"{program} is the referee, and not installed")
    layout, layers = Blobs(), LAYERS
    if program == "podman":  # it refuses a layer that takes away what stands before it in it
        second_layer = archive(*(entry for entry in SECOND if entry.name != ".wh.twice"))
        layers = (LAYERS[0], second_layer, *LAYERS[2:])
    layout.image("v1", *layers)
    source = layout.layout(tmp_path / "oci")
    theirs = listing(referee(source, place))
    for excluded in ("dev/sda", "pipe"):
        assert theirs.pop(excluded, None)
    image = Pull(registry, {}).pull("twelve", f"oci:{source}:v1")
    tree = tmp_path / "ours"
    merge(registry.stack(image.digest)[:0:-1], tree)  # without what we add on top
    assert listing(tree) == theirs


@pytest.mark.apptainer
@pytest.mark.skipif(not shutil.which("apptainer"), reason="Apptainer is the referee")
def test_apptainer_unpacks_the_same(registry: Registry, tmp_path: Path) -> None:
    layout = Blobs()
    plain = (LAYERS[0], *LAYERS[2:])  # it cannot make the device
    layout.image("v1", *plain)
    place, theirs = layout.layout(tmp_path / "oci"), tmp_path / "theirs"
    words = ["apptainer", "-s", "build", "--sandbox", str(theirs), f"oci:{place}"]
    where = {"APPTAINER_CACHEDIR": str(tmp_path / "cache"), "APPTAINER_NO_PRIVS": "1"}
    subprocess.run(words, check=True, env={**os.environ, **where})
    image = Pull(registry, {}).pull("twelve", f"oci:{place}:v1")
    tree = tmp_path / "ours"
    merge(registry.stack(image.digest)[:0:-1], tree)
    ours, their_entries = listing(tree), listing(theirs)
    del ours["etc/hosts"]  # which Apptainer empties; beside the rest is what it adds
    assert {name: their_entries.get(name) for name in ours} == ours


def test_an_archive_of_docker_save(registry: Registry, tmp_path: Path) -> None:
    layer = archive(*BASE)
    config = json.dumps({"rootfs": {"diff_ids": [digest_of(layer)]}, "config": {}}).encode()
    listed = [{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["l/layer.tar"]}]
    path = tmp_path / "saved.tar"
    path.write_bytes(
        archive(
            Entry("manifest.json", json.dumps(listed).encode()),
            Entry("c.json", config),
            Entry("l/layer.tar", layer),
        )
    )
    image = Pull(registry, {}).pull("saved", f"docker-archive:{path}")
    assert "bin/bash" in listing(seen(registry, image, tmp_path))
    with pytest.raises(UserError, match=r"\['a:1'\]"):
        source_of(f"docker-archive:{path}:b:2").manifest()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_root_file_system_in_a_single_archive(
    registry: Registry, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(pack(archive(*BASE, Entry("dev/sda", kind=tarfile.BLKTYPE))))
    image = Pull(registry, {}).pull("one", f"tarball:{path}")
    entries = listing(seen(registry, image, tmp_path))
    assert "bin/bash" in entries
    assert "dev/sda" not in entries
    path.write_bytes(b"no archive")
    with pytest.raises(UserError):
        Pull(registry, {}).pull("two", f"tarball:{path}")


def test_an_index_gives_this_machines_image(server: RegistryServer, registry: Registry) -> None:
    ours, other = (server.blobs.image(tag, archive(*BASE)) for tag in ("a", "b"))
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]

    def index(*places: tuple[bytes, str, str]) -> bytes:
        return json.dumps(
            {
                "manifests": [
                    {"digest": digest_of(m), "platform": {"os": o, "architecture": a}}
                    for m, o, a in places
                ]
            }
        ).encode()

    server.blobs["v1"] = index((other, "windows", arch), (ours, "linux", arch))
    assert Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1").names == ("one",)
    server.blobs["v2"] = index((other, "linux", "s390x"))
    with pytest.raises(UserError, match="s390x"):
        Pull(registry, {}).pull("two", f"docker://{server.host}/x:v2")


# ---- what is shared


def test_layers_are_shared_and_a_second_pull_brings_nothing(
    server: RegistryServer, registry: Registry
) -> None:
    """Twenty images over eight layers: 1.05 of their union on disk."""
    rng = random.Random(0)
    shared = [archive(*BASE), *(archive(Entry(f"s{n}", rng.randbytes(300_000))) for n in range(7))]
    for number in range(20):
        own = archive(Entry("own", rng.randbytes(900_000)))
        server.blobs.image(f"v{number}", *shared, own)
    pulls = Pull(registry, {})
    for number in range(20):
        pulls.pull(f"i{number}", f"docker://{server.host}/x:v{number}")
    blobs = [path for path, _ in server.downloads if "/blobs/" in path]
    assert len(blobs) == len(set(blobs)) == 20 + 8 + 20  # configurations and layers, each once
    there = registry.list()
    union = sum(each.bytes for each in there if each.is_layer)
    disk = sum(about.st_blocks * 512 for _, about in entries(str(registry.root)))
    assert disk < 1.05 * union, disk / union
    layers = {path for path, _ in server.downloads if "/blobs/" in path}
    server.downloads.clear()
    got: list[int] = []
    pulls.pull("i7", f"docker://{server.host}/x:v7", got.append)
    assert got == []
    assert len({path for path, _ in server.downloads if path in layers}) == 1  # its configuration


def test_layers_go_with_the_last_image_that_needs_them(
    server: RegistryServer, registry: Registry
) -> None:
    server.blobs.image("a", archive(*BASE), archive(Entry("a")))
    server.blobs.image("b", archive(*BASE), archive(Entry("b")))
    pulls = Pull(registry, {})
    image_a, two = (pulls.pull(tag, f"docker://{server.host}/x:{tag}") for tag in "ab")
    if not image_a.layers:
        pytest.skip("this machine merges: layers are needed by nothing")
    registry.forget("a")
    (registry.root / "blobs" / "half.new").touch()
    assert [each.digest for each in registry.collect()] == [image_a.layers[1]]
    assert not list((registry.root / "blobs").iterdir())
    assert registry.find("b") == two
    registry.forget("b")

    def collect(_: int) -> None:
        with pytest.raises(ConflictError, match="being pulled"):
            registry.collect()

    server.blobs.image("c", archive(*BASE), archive(Entry("c")))
    three = pulls.pull("c", f"docker://{server.host}/x:c", collect)
    assert three.layers[0] == two.layers[0]
    assert {each.digest for each in registry.collect()} == {two.layers[1]}


def test_two_nodes_with_the_same_store_fetch_each_layer_once(
    server: RegistryServer, registry: Registry
) -> None:
    server.blobs.image("v1", *LAYERS)
    code = (
        "import sys; from pathlib import Path\n"
        "from prorl.sandbox.images.pull import Pull\n"
        "from prorl.sandbox.images.registry import Registry\n"
        "sys.stdin.read(1)\n"
        "Pull(Registry(Path(sys.argv[1])), {}).pull('one', sys.argv[2])"
    )
    words = [sys.executable, "-c", code, str(registry.root), f"docker://{server.host}/x:v1"]
    nodes = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(3)]
    for node in nodes:
        node.communicate(b"x", timeout=60)
    assert [node.returncode for node in nodes] == [0, 0, 0]
    paths = [path for path, _ in server.downloads]
    layers = json.loads(server.blobs["v1"])["layers"]
    assert [paths.count(f"/v2/x/blobs/{layer['digest']}") for layer in layers] == [1] * 12


@pytest.mark.skipif(not shutil.which("docker-registry"), reason="Debian's registry is the referee")
@pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo fills it")
def test_debians_registry(registry: Registry, tmp_path: Path) -> None:
    layout = Blobs()
    layout.image("v1", *LAYERS)
    place = layout.layout(tmp_path / "oci")
    with debians_registry(tmp_path) as host:
        copy = ["skopeo", "copy", "-q", "--retry-times", "5", "--dest-tls-verify=false"]
        words = [*copy, f"oci:{place}:v1", f"docker://{host}/x:v1"]
        subprocess.run(words, check=True, timeout=60)
        image = Pull(registry, {}).pull("one", f"docker://{host}/x:v1")
    assert "opt/two" in listing(seen(registry, image, tmp_path))


# ---- registries that misbehave


def test_a_token_is_requested_with_the_users_secret(
    server: RegistryServer,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.blobs.image("v1", archive(*BASE))
    server.tokens = True
    secret = base64.b64encode(b"me:word").decode()
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {server.host: {"auth": secret}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    assert server.secrets == [f"Basic {secret}"]


def test_a_busy_registry_is_retried(server: RegistryServer, registry: Registry) -> None:
    server.blobs.image("v1", archive(*BASE))
    server.busy = 2
    assert Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")


def test_a_cut_blob_goes_on_where_it_was(server: RegistryServer, registry: Registry) -> None:
    big = archive(*BASE, Entry("big", random.Random(0).randbytes(3 << 20)))
    server.blobs.image("v1", big)
    server.cut_at = 2 << 20
    Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    ranges = [byte_range for _, byte_range in server.downloads if byte_range]
    assert ranges == [f"bytes={2 << 20}-"]
    assert server.sent < len(gzip.compress(big)) + (64 << 10)


def test_a_killed_pull_goes_on_where_it_was(server: RegistryServer, registry: Registry) -> None:
    server.blobs.image("v1", archive(*BASE, Entry("big", random.Random(0).randbytes(3 << 20))))

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1", stop)
    with pytest.raises(NotFoundError):
        registry.find("one")
    Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    assert [byte_range for _, byte_range in server.downloads if byte_range] == [f"bytes={1 << 20}-"]


@pytest.mark.parametrize("harm", ["other", "longer", "shorter"])
def test_a_blob_that_is_another_is_refused(
    server: RegistryServer, registry: Registry, harm: str
) -> None:
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    digest = manifest["layers"][0]["digest"]
    good = server.blobs[digest]
    server.blobs[digest] = {
        "other": good[:-1] + b"?",
        "longer": good + bytes(1 << 20),
        "shorter": good[:-9],
    }[harm]
    with pytest.raises(StorageError, match=r"something else|longer than|was cut"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    assert registry.list() == []
    server.blobs[digest] = good
    Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")


@pytest.mark.parametrize("size", ["12", None, True, -1, 1.5, 1 << 60, "lie longer", "lie shorter"])
def test_a_size_that_is_none_or_lies_is_the_images_fault(
    server: RegistryServer, registry: Registry, size: Any
) -> None:
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    layer = manifest["layers"][0]
    lies = {"lie longer": layer["size"] + 9, "lie shorter": layer["size"] - 9}
    layer["size"] = lies.get(size, size)
    server.blobs["v1"] = json.dumps(manifest).encode()
    with pytest.raises(UserError, match=r"as the size of a layer|a layer of|has not .* bytes"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    assert registry.list() == []


def test_hostile_manifests_are_the_images_fault(server: RegistryServer, registry: Registry) -> None:
    good = json.loads(server.blobs.image("v1", archive(*BASE)))
    many = {**good, "layers": good["layers"] * 600}
    config = json.loads(server.blobs[good["config"]["digest"]])

    def with_config(about: Any) -> bytes:
        digest = server.blobs.put(json.dumps(about).encode())
        return json.dumps({**good, "config": digest}).encode()

    index = server.blobs["v1"]
    for _ in range(9):
        index = json.dumps({"manifests": [server.blobs.put(index)]}).encode()
    hostile = [
        b"[" * 100_000,
        b"[1]",
        index,
        json.dumps(many).encode(),
        with_config({**config, "config": [5]}),
        with_config({**config, "config": {"Env": 7}}),
        with_config({**config, "rootfs": {"diff_ids": [5]}}),
    ]
    for place, body in enumerate(hostile):
        server.blobs["bad"] = body
        with pytest.raises(UserError):
            Pull(registry, {}).pull("one", f"docker://{server.host}/x:bad")
        assert registry.list() == [], place


REDIRECTS = [
    ("a cloud's metadata", "http://169.254.169.254/latest/meta-data/", UserError),
    ("a cloud's metadata as a number", "http://2852039166/latest/", UserError),
    ("this host by no address", "http://0.0.0.0:{port}/v2/x/blobs/y", UserError),
    ("a file", "file:///etc/passwd", UserError),
    ("no address", "http://[::1/x", UserError),
    ("a loop", "{itself}", StorageError),
    ("nobody", "http://127.0.0.1:9/v2/", StorageError),
]


@pytest.mark.parametrize("kind", ["manifest", "configuration", "layer", "token"])
@pytest.mark.parametrize(
    ("location", "error"), [row[1:] for row in REDIRECTS], ids=[row[0] for row in REDIRECTS]
)
def test_a_redirect_leads_nowhere_that_a_registry_may_not_send_a_node(
    server: RegistryServer,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    location: str,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(remote, "RETRIES", remote.RETRIES.new(backoff_factor=0.001))
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    names = {"configuration": manifest["config"], "layer": manifest["layers"][0]}
    name = names[kind]["digest"] if kind in names else {"manifest": "v1", "token": "token"}[kind]
    server.tokens = kind == "token"
    port = server.server_address[1]
    server.redirects[name] = location.format(port=port, itself=f"http://{server.host}/v2/x/{name}")
    with pytest.raises(error, match=r"redirects|does not answer|was cut|token server"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    num_requests = sum(path.partition("?")[0].endswith(f"/{name}") for path, _ in server.requests)
    assert num_requests <= remote.TRIES * (1 + remote.MAX_REDIRECTS)
    assert registry.list() == []
    server.redirects.clear()
    assert Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")


@pytest.mark.parametrize(
    ("base", "url", "is_allowed"),
    [
        ("https://reg.example", "https://blobs.example/x", True),
        ("https://reg.example", "https://10.0.0.5/x", True),  # whose certificate must be its own
        ("https://reg.example", "http://reg.example/x", False),
        ("https://reg.example", "http://10.0.0.5/x", False),
        ("http://10.0.0.5:5000", "http://10.0.0.6:9000/x", True),
        ("http://10.0.0.5:5000", "http://127.0.0.1:7700/x", False),
        ("http://10.0.0.5:5000", "http://[::ffff:127.0.0.1]/x", False),
        ("http://10.0.0.5:5000", "http://169.254.169.254/x", False),
        ("http://10.0.0.5:5000", "http://[fe80::1]/x", False),
        ("http://127.0.0.1:5000", "http://127.0.0.1:9000/x", True),
        ("http://127.0.0.1:5000", "https://blobs.example/x", True),
    ],
)
def test_which_token_servers_a_registry_may_name(base: str, url: str, is_allowed: bool) -> None:
    if is_allowed:
        remote.check_target(base, url, "it redirects to")
    else:
        with pytest.raises(UserError, match=r"redirects to .*; expected an https address"):
            remote.check_target(base, url, "it redirects to")


def test_a_secret_stays_with_its_registry(
    server: RegistryServer, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs and tokens come by redirect from another one, which asks for a login itself."""
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    layer = manifest["layers"][0]["digest"]
    server.tokens = True
    secret = base64.b64encode(b"me:word").decode()
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {server.host: {"auth": secret}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    with serving(Blobs(server.blobs)) as other:
        server.redirects[layer] = f"http://{other.host}/v2/x/blobs/{layer}"
        other.tokens = True
        with pytest.raises(StorageError, match="answered 401"):
            Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
        other.tokens = False
        assert Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
        server.redirects["token"] = f"http://{other.host}/token"
        assert Pull(registry, {}).pull("two", f"docker://{server.host}/x:v1")
    assert {secret for _, secret in server.requests} == {"", f"Basic {secret}", "Bearer let-me-in"}
    assert {secret for _, secret in other.requests} == {""}
    assert len(other.requests) == 3


def test_an_encrypted_registry_leads_to_no_plain_line(
    server: RegistryServer, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    with serving(Blobs(server.blobs), encrypted(tmp_path, monkeypatch)) as secure:
        mirrors = {"docker.io": f"https://{secure.host}"}
        for name in ("v1", manifest["layers"][0]["digest"]):
            secure.redirects = {name: f"http://{server.host}/v2/x/blobs/{name}"}
            source = remote.Remote("debian:v1", mirrors)
            monkeypatch.setattr(source, "_bases", source._bases[:1])  # not the public registry
            with pytest.raises(UserError, match="expected an https address"):
                source.blob(source.manifest().layers[0], tmp_path / "blob", lambda _: None)
        assert server.requests == []


def encrypted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's context with a certificate of its own for 127.0.0.1, which clients here trust."""
    paths = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem"))
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, *paths], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
    return context


@pytest.mark.parametrize("kind", ["manifest", "configuration", "layer"])
@pytest.mark.parametrize("lie", [-9, 9, 1 << 40])
def test_a_length_that_lies_cuts_what_is_whole_by_its_digest_alone(
    server: RegistryServer, registry: Registry, kind: str, lie: int
) -> None:
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    names = {"configuration": manifest["config"], "layer": manifest["layers"][0]}
    server.lengths[names[kind]["digest"] if kind in names else "v1"] = lie
    if lie < 0:
        with pytest.raises(StorageError, match=r"something else than|was cut"):
            Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
        assert registry.list() == []
        server.lengths.clear()
    assert Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")


@pytest.mark.parametrize(("status", "again"), [(401, True), (403, True), (404, False)])
async def test_a_refusal_is_the_nodes_and_what_is_not_there_the_tasks_for_a_minute(
    server: RegistryServer, tmp_path: Path, status: int, again: bool
) -> None:
    server.blobs.image("v1", archive(*BASE))
    server.busy, server.busy_status = 1 << 20, status
    now = [0.0]
    cache = ImageCache(tmp_path / "images", {}, lambda: now[0])
    image = f"docker://{server.host}/x:v1"
    for _ in range(2):
        with pytest.raises(SandboxError, match=f"answered {status}") as caught:
            await cache.locate(image)
        code = FailureCode.SANDBOX_START if again else FailureCode.BAD_TASK
        assert caught.value.code is code
    num_requests = (1 << 20) - server.busy
    assert num_requests == (2 if again else 1), "a login, or a push, would not be heard of"
    server.busy = 0  # the login was renewed, or the image was pushed
    if not again:
        with pytest.raises(SandboxError, match="answered 404"):
            await cache.locate(image)
        now[0] += 61
    assert await cache.locate(image)
    await cache.close()


def test_a_full_disk_says_what_images_take(
    server: RegistryServer, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads(server.blobs.image("v1", archive(*BASE)))
    manifest["layers"][0]["size"] = 1 << 37
    server.blobs["v1"] = json.dumps(manifest).encode()
    if shutil.disk_usage(registry.root).free > 1 << 37:
        pytest.skip("this disk has room for 128 GiB")
    with pytest.raises(StorageError, match=r"137439 MB to come; .* its images take 0 MB; .* gc"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")


@pytest.mark.skipif(os.getuid() != 0, reason="a small disk is mounted as root only")
async def test_a_disk_that_a_layer_fills_says_so_and_is_no_tasks_fault(
    server: RegistryServer, tmp_path: Path
) -> None:
    """A layer that is small when packed: only its unpacking shows that there is no room."""
    server.blobs.image("v1", archive(*BASE))
    server.blobs.image("v2", archive(*BASE, Entry("big", bytes(64 << 20))))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], check=True)
    try:
        cache = ImageCache(disk, {})
        assert await cache.locate(f"docker://{server.host}/x:v1")
        with pytest.raises(SandboxError, match=r"its images take .* `prorl image gc") as caught:
            await cache.locate(f"docker://{server.host}/y:v2")
        assert caught.value.code is FailureCode.SANDBOX_START
        await cache.close()
        assert Registry(disk).names() == ["x_v1"]
        assert list((disk / "work").iterdir()) == list((disk / "blobs").iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_pulled_images_are_evicted_by_age_and_size(
    server: RegistryServer, registry: Registry, tmp_path: Path
) -> None:
    pulls = Pull(registry, {})
    for place, name in enumerate(("oldest", "older", "used", "new")):
        big = Entry("big", random.Random(place).randbytes(1 << 20))
        server.blobs.image(name, archive(*BASE, big))
        pulls.pull(name, f"docker://{server.host}/x:{name}")
        lock = registry.root / "locks" / registry.digest_of_name(name)
        lock.touch()
        note = registry.root / "images" / f"{lock.name}.json"
        about = json.loads(note.read_text())
        day = 86400.0
        ages = {"oldest": 9, "older": 6, "used": 9, "new": 0}
        note.write_text(json.dumps({**about, "made_at": time.time() - ages[name] * day}))
        os.utime(lock, (0, time.time() - (3 if name == "used" else ages[name]) * day))
    registry.name("alias", registry.digest_of_name("oldest"))
    with registry.lock(registry.digest_of_name("oldest"), shared=True):
        assert registry.collect(older_than_s=8 * day) == (), "what is used stays"
        assert registry.names() == ["alias", "new", "older", "oldest", "used"]
    assert names_of(registry.collect(older_than_s=8 * day)) == ["alias", "oldest"]
    assert registry.names() == ["new", "older", "used"]
    assert names_of(registry.collect(keep_bytes=(2 << 20) + (512 << 10))) == ["older"]
    assert registry.names() == ["new", "used"]
    total_bytes = sum(each.bytes for each in registry.list())
    assert total_bytes < (2 << 20) + (512 << 10), "layers go with their images"


def names_of(images: tuple[Image, ...]) -> list[str]:
    return [name for image in images for name in image.names]


def test_a_manifest_that_is_another_is_refused(server: RegistryServer, registry: Registry) -> None:
    server.blobs.image("v1", archive(*BASE))
    digest = "sha256:" + "0" * 64
    server.blobs[digest] = server.blobs["v1"]
    with pytest.raises(StorageError, match="something else"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x@{digest}")


def test_a_mirror_is_tried_first_and_the_registry_itself_next(
    server: RegistryServer, registry: Registry
) -> None:
    server.blobs.image("v1", archive(*BASE))
    Pull(registry, {"docker.io": f"http://{server.host}"}).pull("one", "docker://debian:v1")
    assert {path.split("/")[3] for path, _ in server.downloads} == {"debian"}
    with serving(Blobs()) as empty:
        mirrors = {server.host: f"http://{empty.host}"}
        assert Pull(registry, mirrors).pull("two", f"docker://{server.host}/x:v1")


# ---- archives that are hostile


def harmless(root: Path) -> None:
    """Nothing beside the layer's own folder."""
    assert sorted(os.listdir(root)) == ["blob", "tree"]


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("../out", b"x")],
        [Entry("a/../../out", b"x")],
        [Entry("..", kind=tarfile.DIRTYPE)],
        [Entry("out", kind=tarfile.LNKTYPE, link="../blob")],
        [Entry("out", kind=tarfile.LNKTYPE, link="/etc/hostname")],
        [Entry("l", kind=tarfile.SYMTYPE, link="l"), Entry("l/x", b"x")],
        [Entry("ok", b"x"), Entry("f", kind=tarfile.LNKTYPE, link="")],
    ],
    ids=["climbs", "climbs inside", "parent", "link up", "link out", "circle", "link to the top"],
)
def test_what_leads_out_is_refused(tmp_path: Path, entries: list[Entry]) -> None:
    data = archive(*entries)
    (tmp_path / "blob").write_bytes(data)
    with pytest.raises(UserError):
        unpack(tmp_path / "blob", tmp_path / "tree", digest_of(data), WIDE, marks=True)
    harmless(tmp_path)


@pytest.mark.parametrize(
    ("entries", "where"),
    [
        ([Entry("/abs", b"x")], "abs"),
        ([Entry("l", kind=tarfile.SYMTYPE, link="/"), Entry("l/x", b"x")], "x"),
        ([Entry("l", kind=tarfile.SYMTYPE, link="../../.."), Entry("l/x", b"x")], "x"),
        ([folder("d"), Entry("d/l", kind=tarfile.SYMTYPE, link="../e"), Entry("d/l/x")], "e/x"),
        ([Entry("l", kind=tarfile.SYMTYPE, link="/d"), Entry("l", b"x")], "l"),
        ([Entry("f", b"1"), Entry("f/x", b"x")], "f/x"),
        ([folder("d", 0), Entry("d/x", b"x")], "d/x"),
    ],
    ids=["absolute", "link to /", "climbing link", "link", "over a link", "over a file", "closed"],
)
def test_what_leads_in_is_followed_inside(tmp_path: Path, entries: list[Entry], where: str) -> None:
    data = archive(*entries)
    (tmp_path / "blob").write_bytes(gzip.compress(data))
    unpack(tmp_path / "blob", tmp_path / "tree", digest_of(data), WIDE, marks=True)
    assert stat.S_ISREG(os.lstat(tmp_path / "tree" / where).st_mode)
    harmless(tmp_path)


def test_a_folder_of_another_mode_is_cleared(tmp_path: Path) -> None:
    data = archive(folder("d"), Entry("d/x"), Entry("d/.wh.x"), Entry("e/.wh..wh.plnk"))
    (tmp_path / "blob").write_bytes(data)
    unpack(tmp_path / "blob", tmp_path / "tree", digest_of(data), WIDE, marks=True)
    assert sorted(os.listdir(tmp_path / "tree" / "d")) == ["x"]  # marks are for lower layers
    remove_tree(str(tmp_path / "tree"))


@pytest.mark.parametrize("harm", ["bytes", "headers", "cut", "gzip", "digest", "no tar"])
def test_broken_archives_are_refused(tmp_path: Path, harm: str) -> None:
    data = archive(*BASE, Entry("big", bytes(2 << 20)))
    limit, diff_id = WIDE, digest_of(data)
    if harm == "bytes":
        limit = 1 << 20
    elif harm == "headers":
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
            info = tarfile.TarInfo("x")
            info.pax_headers = {"comment": "x" * (9 << 20)}
            target.addfile(info)
        data = buffer.getvalue()
    elif harm == "cut":
        data = data[: 1 << 20]
    elif harm == "digest":
        diff_id = digest_of(b"")
    elif harm == "no tar":
        data = bytes([255]) * 4096
    blob = gzip.compress(data)
    (tmp_path / "blob").write_bytes(blob[:-2000] if harm == "gzip" else blob)
    # the disk is the node's; all else is the image's
    with pytest.raises(OSError if harm == "bytes" else UserError):
        unpack(tmp_path / "blob", tmp_path / "tree", diff_id, limit, marks=True)
    harmless(tmp_path)


def test_what_has_no_shell_is_no_image(server: RegistryServer, registry: Registry) -> None:
    server.blobs.image("v1", archive(*BASE), archive(Entry("bin/.wh.bash")))
    with pytest.raises(UserError, match="no bash"):
        Pull(registry, {}).pull("one", f"docker://{server.host}/x:v1")
    assert registry.names() == []


@pytest.mark.parametrize(
    "bad", ["docker://", "docker://a b", "oci:", "tarball:/no", "debian", "docker://x/../y"]
)
def test_bad_references(registry: Registry, bad: str) -> None:
    with pytest.raises(UserError):
        source_of(bad).manifest()
