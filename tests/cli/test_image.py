"""`prorl image`: build from a folder, list, remove; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.cli.app import DONE, dispatch
from tests.sandbox.image_sources import BASE, Blobs, Entry, archive, serving


def make_source(folder: Path) -> Path:
    """The smallest folder that counts as a root file system."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "bash").write_text("#!")
    return folder


def test_build_list_remove(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_SANDBOX__IMAGES", str(tmp_path / "images"))
    assert dispatch(["image", "ls"]) == DONE
    assert "`prorl image pull` and `build` make them" in capfd.readouterr().out
    source = make_source(tmp_path / "source")
    assert dispatch(["image", "build", "one", "--from", str(source)]) == DONE
    assert capfd.readouterr().out.startswith("one: ")
    assert dispatch(["image", "ls", "--json"]) == DONE
    (image,) = json.loads(capfd.readouterr().out)
    assert (image["names"], image["source"], Path(image["path"]).is_dir()) == (
        ["one"],
        str(source),
        True,
    )
    assert dispatch(["image", "rm", "one"]) == DONE
    assert not Path(image["path"]).exists()


def test_images_of_rows_are_pulled_and_missing_images_are_listed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blobs, rows = Blobs(), tmp_path / "tasks.jsonl"
    for tag in ("one", "two"):
        blobs.image(tag, archive(*BASE), archive(Entry(tag)))
    with serving(blobs) as server:
        rows.write_text(
            "\n".join(
                json.dumps(
                    {
                        "task_id": f"{number}",
                        "env": "swe",
                        "prompt": "?",
                        "data": {"image": f"docker://{server.host}/x:{tag}"},
                    }
                )
                for number, tag in enumerate(("one", "two", "none", "one"))
            )
        )
        where = ["--images", str(tmp_path / "images")]
        assert dispatch(["image", "pull", "--rows", str(rows), *where]) == 1
        captured = capfd.readouterr()
        assert "3 images, 0 here; 3 layers of" in captured.err
        assert "missing: x_none: docker://" in captured.err
        assert captured.out == "2 pulled, 0 were here, 1 missing\n"
        blobs.image("none", archive(*BASE))
        num_requests = len(server.downloads)
        assert dispatch(["image", "pull", "--rows", str(rows), *where]) == DONE
        assert capfd.readouterr().out == "1 pulled, 2 were here, 0 missing\n"
        assert (
            len(server.downloads) - num_requests == 4
        )  # manifest and configuration, looked at and pulled
    assert dispatch(["image", "ls", "--json", *where]) == DONE
    images = json.loads(capfd.readouterr().out)
    assert [each["names"] for each in images] == [["x_none"], ["x_one"], ["x_two"]]
    assert dispatch(["image", "du", *where]) == DONE
    assert "MB on disk in 3 images" in capfd.readouterr().out
    assert dispatch(["image", "rm", "x_one", *where]) == DONE
    assert dispatch(["image", "gc", *where]) == DONE
    assert len(capfd.readouterr().out.splitlines()) == 2  # the image, and its own layer
