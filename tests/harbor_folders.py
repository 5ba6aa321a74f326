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

STEPS = {
    "instruction.md": None,
    "steps/one/instruction.md": "Write 5 into sum.txt.\n",
    "steps/one/solution/solve.sh": "#!/bin/bash\necho 5 > sum.txt\n",
    "steps/two/instruction.md": "Write 7 into sum.txt.\n",
    "steps/two/solution/solve.sh": "#!/bin/bash\necho 7 > sum.txt\n",
    "steps/two/tests/expected": "7\n",
    "tests/expected": "5\n",
    "tests/test.sh": (
        "#!/bin/bash\n"
        'if [ "$(< sum.txt)" = "$(< /tests/expected)" ]; then r=1; else r=0; fi\n'
        "echo $r > /logs/verifier/reward.txt\n"
    ),
}
"""What replaces the usual files in a task of two steps, `one` and `two`."""
STEPS_TOML = '\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
TERMINAL_BENCH = {
    **dict.fromkeys(PARTS),
    "task.yaml": "instruction: Write 5 into sum.txt.\nmax_test_timeout_sec: 30\n",
    "Dockerfile": "FROM small\n",
    "docker-compose.yaml": (
        "services: {client: {build: {dockerfile: Dockerfile},"
        ' environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", SIDE=agent]}}\n'
    ),
    "tests/expected": "5\n",
    "run-tests.sh": (
        'echo "== short test summary info =="\necho PASSED is the first\n'
        'if [ "$(< sum.txt)" = "$(< $TEST_DIR/expected)" ]; then echo PASSED two;'
        " else echo FAILED two; fi\n"
    ),
    "solution.sh": "echo 5 > sum.txt\n",
}
"""What replaces the usual files in a task of terminal-bench 1."""


def make_folder(folder: Path, **parts: str | bytes | None) -> Path:
    """A task folder that can be played; `parts` replace its files, None leaves one out."""
    for path, text in {**PARTS, **parts}.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
