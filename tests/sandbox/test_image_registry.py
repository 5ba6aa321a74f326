"""The registry's promises on disk: complete or absent, swept after a death, kept while in use."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.sandbox.images.registry import LISTED, Image, Registry, is_name, is_sif
from prorl.sandbox.images.tree import (
    add_mount_points,
    copy_tree,
    digest_of,
    has_mount_points,
    has_shell,
    tidy,
)


def make_tree(folder: Path, content: str = "hello") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "bash").write_text(content)
    (folder / "etc").mkdir()
    (folder / "etc" / "link").symlink_to("../bin/bash")
    return folder


def add(registry: Registry, content: str = "hello") -> Image:
    digest = hashlib.sha256(content.encode()).hexdigest()
    return registry.make(digest, "test", lambda work: _fill(work, content))


def _fill(work: Path, content: str) -> None:
    make_tree(work / "tree", content)


def test_a_name_stands_for_a_folder(registry: Registry) -> None:
    image = registry.name("one", add(registry).digest)
    assert Path(image.path, "bin", "bash").read_text() == "hello"
    assert (image.names, image.files) == (("one",), 4)
    assert registry.find("one") == image
    assert list((registry.root / "work").iterdir()) == []


def test_an_unknown_name_is_refused_with_what_there_is(registry: Registry) -> None:
    registry.name("one", add(registry).digest)
    with pytest.raises(NotFoundError, match=r"no image 'two' .* there are: one$"):
        registry.find("two")


def test_an_unknown_name_among_many_is_refused_with_a_few_of_them(registry: Registry) -> None:
    digest = add(registry).digest
    for number in range(LISTED + 3):
        registry.name(f"n{number:02}", digest)
    with pytest.raises(NotFoundError, match=r"n00, .*, n07 and 3 more \(`prorl image ls`\)$"):
        registry.find("two")


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * 129, "ü"])
def test_bad_names(registry: Registry, name: str) -> None:
    assert not is_name(name)
    with pytest.raises(UserError, match="image name"):
        registry.name(name, add(registry).digest)


def test_equal_digests_are_made_once(registry: Registry) -> None:
    first, second = add(registry), add(registry)
    assert first == second
    assert len(registry.list()) == 1
    assert add(registry, "other").digest != first.digest


def test_names_listed_first_then_the_rest(registry: Registry) -> None:
    add(registry, "a")
    named = registry.name("z", add(registry, "b").digest)
    assert registry.list()[0] == named
    assert registry.list()[1].names == ()


def test_forgetting_the_last_name_removes_the_folder(registry: Registry) -> None:
    image = registry.name("one", add(registry).digest)
    registry.name("two", image.digest)
    registry.forget("one")
    assert Path(image.path).exists()
    registry.forget("two")
    assert not Path(image.path).exists()
    assert registry.list() == []


def test_an_image_in_use_stays(registry: Registry) -> None:
    image = registry.name("one", add(registry).digest)
    with registry.lock(image.digest, shared=True), pytest.raises(ConflictError, match="in use"):
        registry.forget("one")
    assert registry.find("one") == image
    registry.forget("one")


def test_unfinished_images_of_a_killed_maker_are_swept_and_those_of_a_live_maker_are_not(
    registry: Registry,
) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from prorl.sandbox.images.registry import Registry\n"
        "with Registry(Path(sys.argv[1])).workplace() as work:\n"
        "    (work / 'half').write_text('x'); print('made', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(registry.root)], stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"made\n"
        registry.open()
        assert len(list((registry.root / "work").glob("*/half"))) == 1
        maker.send_signal(signal.SIGKILL)
    registry.open()
    assert list((registry.root / "work").iterdir()) == []


def test_a_folder_without_its_description_is_no_image_and_is_replaced(registry: Registry) -> None:
    """A power cut between the two renames of `keep` leaves such a folder."""
    image = add(registry)
    registry.folder(image.digest).with_suffix(".json").unlink()
    Path(image.path, "bin", "bash").write_text("half")
    assert not registry.has(image.digest)
    assert registry.list() == []
    assert Path(add(registry).path, "bin", "bash").read_text() == "hello"


def test_sif_magic(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0")
    assert is_sif(str(path))
    path.write_bytes(b"short")
    assert not is_sif(str(path))


def test_copying_leaves_out_devices_and_the_registry_itself(
    registry: Registry, tmp_path: Path
) -> None:
    os.mkfifo(make_tree(tmp_path / "source") / "pipe")
    registry.root.rename(tmp_path / "source" / "registry")
    copy_tree(
        str(tmp_path / "source"), str(tmp_path / "copy"), str(tmp_path / "source" / "registry")
    )
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["bin", "etc"]
    assert os.readlink(tmp_path / "copy" / "etc" / "link") == "../bin/bash"
    assert has_shell(str(tmp_path / "copy"))


def test_tidying_takes_away_what_is_no_file(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    os.mkfifo(tree / "pipe")
    (tree / "locked" / "inside").mkdir(parents=True)
    (tree / "locked").chmod(0o050)
    tidy(str(tree))
    assert not (tree / "pipe").exists()
    assert (tree / "locked").stat().st_mode & 0o777 == 0o750
    assert tree.stat().st_mode & 0o777 == 0o755


def test_mount_points_are_added_and_no_link_of_the_image_is_followed(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tree / "opt").symlink_to(outside)
    (tree / "etc" / "hosts").symlink_to(outside / "hosts")
    add_mount_points(str(tree))
    assert (tree / "workspace").is_dir()
    assert (tree / "etc" / "passwd").read_text() == ""
    assert list(outside.iterdir()) == []
    assert not has_mount_points(str(tree))
    (tree / "opt").unlink()
    add_mount_points(str(tree))
    assert has_mount_points(str(tree))


def test_the_digest_sees_contents_modes_links_and_names(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    seen = {digest_of(str(tree))}
    (tree / "bin" / "bash").write_text("other")
    seen.add(digest_of(str(tree)))
    (tree / "bin" / "bash").chmod(0o700)
    seen.add(digest_of(str(tree)))
    (tree / "etc" / "link").unlink()
    (tree / "etc" / "link").symlink_to("elsewhere")
    seen.add(digest_of(str(tree)))
    (tree / "etc" / "link").rename(tree / "etc" / "name")
    seen.add(digest_of(str(tree)))
    assert len(seen) == 5
