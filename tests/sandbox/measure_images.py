"""What pulled images cost beside skopeo with umoci, and Apptainer: prints one line each.

Fifty images over eight shared layers, from Debian's docker-registry; then sandboxes of a pulled
image beside sandboxes of a folder with the same files, also when there are 500 images.

python -m tests.sandbox.measure_images [IMAGES]      so many for the others, who take long
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.images.stack import merge
from prorl.sandbox.images.tree import entries
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec
from tests.sandbox.image_sources import Blobs, Entry, archive, debians_registry, packed
from tests.sandbox.small_image import make_image

IMAGES, SHARED, FILES, STARTS = 50, 8, 200, 12
OTHERS = 500


def main(rivals: int) -> None:
    """Make a registry, pull from it in three ways, start sandboxes."""
    with tempfile.TemporaryDirectory(prefix="prorl-m-", dir="/tmp") as name:
        work = Path(name)
        work.chmod(0o755)
        layout = _layout(work)
        with debians_registry(work) as host:
            for number in range(IMAGES):
                copy = ["skopeo", "copy", "-q", "--retry-times", "5", "--dest-tls-verify=false"]
                _run(*copy, f"oci:{layout}:v{number}", f"docker://{host}/x:v{number}")
            store = Registry(work / "store")
            union = _ours(store, host)
            asyncio.run(_starts(store, work))
            _skopeo_and_umoci(work, host, union, rivals)
            _apptainer(work, union, rivals)


def _layout(work: Path) -> Path:
    """About 35 MB in 1,500 files shared, a hundred kilobytes of each image's own."""
    rng, blobs = random.Random(0), Blobs()
    shared = [packed(make_image(work))]
    for layer in range(1, SHARED):
        files = (
            Entry(f"opt/l{layer}/d{n % 20}/{n}", rng.randbytes(8_000) + bytes(8_000))
            for n in range(FILES)
        )
        shared.append(archive(*files))
    for number in range(OTHERS):
        blobs.image(f"v{number}", *shared, archive(Entry("own", rng.randbytes(100_000))))
    return blobs.layout(work / "layout")


def _ours(store: Registry, host: str) -> int:
    begin = time.perf_counter()
    pulls = Pull(store, {})
    for number in range(IMAGES):
        pulls.pull(f"v{number}", f"docker://{host}/x:v{number}")
    took = time.perf_counter() - begin
    union = sum(each.bytes for each in store.list() if each.is_layer)
    _say("prorl", IMAGES, took, _disk(store.root), union)
    got: list[int] = []
    begin = time.perf_counter()
    for number in range(IMAGES):
        pulls.pull(f"v{number}", f"docker://{host}/x:v{number}", got.append)
    print(
        f"second pull: {sum(got)} bytes of layers, {time.perf_counter() - begin:.1f} s", flush=True
    )
    return union


def _skopeo_and_umoci(work: Path, host: str, union: int, count: int) -> None:
    place, begin = work / "rival", time.perf_counter()
    place.mkdir()
    for number in range(count):
        copy = ["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{host}/x:v{number}"]
        _run(*copy, f"oci:{place}/layout:v{number}")
        _run("umoci", "unpack", "--image", f"{place}/layout:v{number}", f"{place}/v{number}")
    _say("skopeo and umoci", count, time.perf_counter() - begin, _disk(place), union)
    _run("rm", "-r", str(place))


def _apptainer(work: Path, union: int, count: int) -> None:
    place, begin = work / "apptainer", time.perf_counter()
    place.mkdir()
    os.environ["APPTAINER_CACHEDIR"], os.environ["APPTAINER_NO_PRIVS"] = f"{place}/cache", "1"
    for number in range(count):
        words = ["apptainer", "-s", "build", "--sandbox", f"{place}/v{number}"]
        # it reads neither references with a port nor layouts with tags
        one = f"oci:{place}/one-{number}"
        _run("skopeo", "copy", "-q", f"oci:{work}/layout:v{number}", one)
        _run(*words, one)
    _say("apptainer build --sandbox", count, time.perf_counter() - begin, _disk(place), union)
    _run("rm", "-r", str(place))


async def _starts(store: Registry, work: Path) -> None:
    """Starts of a pulled image by turns with those of a folder, with few images and with many."""
    image = store.find("v0")
    folder = work / "folder"
    merge(store.stack(image.digest)[::-1], folder)
    pulls = Pull(store, {})
    for many in (False, True):
        if many:
            for number in range(IMAGES, OTHERS):
                pulls.pull(f"v{number}", f"oci:{work}/layout:v{number}")
        async with spawned("apptainer", images=str(store.root)) as (host, _):
            took: dict[str, list[float]] = {str(folder): [], "v0": []}
            for _ in range(STARTS):
                for name, times in took.items():
                    begin = time.perf_counter()
                    ref = await host.start("m/0/1", "run", SandboxSpec(image=name))
                    times.append(time.perf_counter() - begin)
                    await host.stop(ref)
        first = took["v0"][0] / took[str(folder)][0]
        median = {name: statistics.median(times[1:]) for name, times in took.items()}
        print(
            f"a sandbox of a pulled image with {OTHERS if many else IMAGES} images:"
            f" {median['v0'] * 1e3:.0f} ms, {median['v0'] / median[str(folder)]:.2f} of one of a"
            f" folder; the first {first:.2f}"
        )


def _say(who: str, count: int, took: float, disk: int, union: int) -> None:
    print(
        f"{who}: {count} images in {took:.1f} s, {disk / 1e6:.0f} MB on disk,"
        f" {disk / union:.2f} of the union of {IMAGES}",
        flush=True,
    )


def _disk(place: Path) -> int:
    """Bytes on disk; what is linked twice counts once."""
    return sum({about.st_ino: about.st_blocks * 512 for _, about in entries(str(place))}.values())


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=300)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else IMAGES)
