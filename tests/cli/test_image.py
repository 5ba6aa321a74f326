"""`prorl image`: build from a folder, list, remove; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.cli.app import DONE, MISTAKE, dispatch


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
    assert "`prorl image build` makes one" in capfd.readouterr().out
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


def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--images", str(tmp_path / "images")]
    for argv, message in (
        (["rm", "none", *where], "error: no image 'none' in"),
        (["rm", *where], "error: prorl image rm without a name; expected NAME... or --unused"),
        (
            ["build", "a/b", "--from", str(make_source(tmp_path / "source")), *where],
            "error: image name 'a/b'; expected letters",
        ),
        (
            ["build", "one", "--from", "docker://debian", *where],
            "error: image source 'docker://debian'; expected a folder",
        ),
    ):
        assert dispatch(["image", *argv]) == MISTAKE
        assert capfd.readouterr().err.splitlines()[-1].startswith(message)
