"""Small Harbor task folders for tests, written here for the purpose."""

from __future__ import annotations

from pathlib import Path

TOML = """schema_version = "1.3"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 60.5
[environment]
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
"""
PARTS = {
    "task.toml": TOML,
    "instruction.md": "Write the sum of 2 and 3 into sum.txt.\n",
    "environment/Dockerfile": "FROM small\nWORKDIR /workspace/data\n",
    "solution/solve.sh": "#!/bin/bash\necho 5 > sum.txt\n",
    "tests/test.sh": (
        "#!/bin/bash\n"
        'if [ "$(cat sum.txt)" = 5 ]; then r=1; else r=0; fi\n'
        "echo $r > /logs/verifier/reward.txt\n"
    ),
}


def make_folder(folder: Path, **parts: str | bytes | None) -> Path:
    """A task folder that can be played; `parts` replace its files, None leaves one out."""
    for path, text in {**PARTS, **parts}.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
