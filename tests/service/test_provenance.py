"""A run directory says what made it."""

from __future__ import annotations

from pathlib import Path

from prorl.analysis.provenance import provenance as provenance_of
from prorl.service.core.manifest import code_sha256, fingerprint, provenance, write_manifest
from prorl.storage.read.catalog import StoredRun
from prorl.storage.write.convert import task_rows
from tests.service.running_gateway import run_config, settings
from tests.service.test_directories import written_run
from tests.storage.run_directories import add_commit
from tests.storage.scored_rows import task_row

CHECKPOINT = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}"}


def checkpoint(folder: Path, **more: str) -> Path:
    folder.mkdir()
    for name, text in {**CHECKPOINT, **more}.items():
        (folder / name).write_text(text)
    return folder


def test_the_manifest_names_policy_tokenizer_sandbox_and_code(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", weights="w1")
    url = "http://127.0.0.1:4711"
    service = settings(
        tmp_path,
        backends=(url, "scripted:oracle"),
        models={url: f"embedded:{model}"},
        tokenizer=str(model),
        sandbox={"kind": "pyns"},
    )
    manifest = write_manifest(service, run_config(), 1_000.0).manifest()
    assert manifest["backends"] == {
        url: {"policy": f"embedded:{model}", "sha256": fingerprint(model)},
        "scripted:oracle": {"policy": "scripted:oracle", "sha256": ""},
    }
    assert manifest["tokenizer"] == str(model)
    assert manifest["sandbox"]["kind"] == "pyns"
    assert manifest["code_sha256"] == code_sha256()


def test_a_model_folder_of_this_host_is_hashed(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", weights="w1")
    url, served = "http://127.0.0.1:4711", {"model": "m", "root": str(model), "max_model_len": 9}
    service = settings(tmp_path, backends=(url,))
    backends = provenance(service, run_config(), {url: served})["backends"]
    assert backends == {url: {"policy": url, "sha256": fingerprint(model), "served": served}}


def test_other_weights_are_another_policy(tmp_path: Path) -> None:
    first = fingerprint(checkpoint(tmp_path / "a", weights="w1"))
    assert fingerprint(checkpoint(tmp_path / "b", weights="w1")) == first
    assert fingerprint(checkpoint(tmp_path / "c", weights="w2")) != first
    assert fingerprint(tmp_path / "nowhere") == ""


def test_a_run_with_backends_of_its_own_names_those(tmp_path: Path) -> None:
    run = run_config(backends=("scripted:flaky",))
    assert list(provenance(settings(tmp_path), run)["backends"]) == ["scripted:flaky"]


def test_other_tasks_are_another_digest(tmp_path: Path) -> None:
    """Whatever file they came from, or none."""
    (tmp_path / "a").mkdir()
    run = written_run(tmp_path / "a" / "root")

    def digest() -> str:
        stored = StoredRun(run.root)
        return provenance_of(stored, lambda sql: stored.sql(sql).to_pylist())["tasks"]

    before = digest()
    add_commit(run, {"tasks": task_rows(task_row(g, "noop") for g in (2, 3))})
    assert digest() == before, "asked again, under other groups"
    add_commit(run, {"tasks": task_rows([task_row(4, "noop", '{"x":1}')])})
    assert digest() != before
