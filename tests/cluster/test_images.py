"""A Harbor task's image on several hosts: the first node that needs it builds it, the other fetches
it from the store, and both play the task.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.registry import Registry
from prorl.storage.read.catalog import StoredRun
from tests.cluster.cluster_service import running_cluster
from tests.harbor_folders import make_folder
from tests.integration.run_checks import rows as query
from tests.sandbox import small_image
from tests.sandbox.conftest import short_folder
from tests.sandbox.test_image_build import dockerfile as make_build
from tests.sandbox.test_image_build import needs_buildah

SUBMIT = """
import sys, prorl
client = prorl.connect(sys.argv[1])
client.create_run(run_id="far")
client.submit("far", prorl.load_tasks(sys.argv[2]), n=16, key="k", last=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_buildah
def test_an_image_is_built_on_one_host_and_fetched_by_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small_image.make_image(tmp_path, (*small_image.PROGRAMS, "chmod", "mkdir"))
    make_build(tmp_path / "task", base, "WORKDIR /app\nRUN echo built > made\n")
    folder = make_folder(tmp_path / "task", **{"environment/Dockerfile": None})
    (tmp_path / "task/build").rename(tmp_path / "task/environment")
    real, counted = dockerfile.program(), tmp_path / "counted"
    builder = tmp_path / "bin" / os.path.basename(real)
    builder.parent.mkdir()
    builder.write_text(f'#!/bin/bash\necho "$1" >> {counted}\nexec {real} "$@"\n')
    builder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{builder.parent}:{os.environ['PATH']}")
    with (
        short_folder(0o755) as images,
        running_cluster(tmp_path, num_nodes=0, num_hosts=3, turn_s=0.5) as cluster,
    ):
        for host in (2, 3):
            own = f"service.sandbox.images={images}/n{host}"
            store = f"service.sandbox.build.store={images}/store"
            cluster.node(host, "--set", own, "--set", store)
        submit = (sys.executable, "-c", SUBMIT, str(cluster.root), str(folder))
        subprocess.run(cluster.hosts.argv(1, *submit), check=True)
        cluster.num = 16
        cluster.finish()
        assert counted.read_text().split().count("build") == 1
        assert [len(Registry(images / f"n{host}").names()) for host in (2, 3)] == [1, 1]
        listing = "select reward, count(*)::int as num from rollouts group by 1"
        assert query(StoredRun(cluster.root / "far"), listing) == [{"reward": 1.0, "num": 16}]
