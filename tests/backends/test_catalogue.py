"""The table of URL schemes: every row opens, users' rows join it, nothing else knows a scheme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prorl.backends import open_backend, open_probed
from prorl.backends.catalogue import CATALOGUE
from prorl.backends.scripted import Script
from prorl.cli.app import dispatch
from prorl.cli.settings import POLICIES, backend
from prorl.envs import get_env
from prorl.errors import BackendError, ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer
from tests.user_package import installed

RENDERER = ChatMLRenderer(ByteTokenizer())
ROOM = Path(__file__).parents[2] / "prorl"

ECHO = """
    from prorl.errors import ConfigError

    class Echo:
        def __init__(self, url, context):
            self.name, self.unfit = url, "raw" in url
            assert context.renderer.vocab_size and context.env("noop").name == "noop"
            self.closed = False

        async def generate(self, request): raise NotImplementedError

        async def close(self):
            self.closed = True

        async def probe(self):
            if self.unfit:
                raise ConfigError("its logprobs are raw")

    def broken(url, context):
        raise RuntimeError("no licence")
"""


def test_every_script_and_what_it_takes_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    _, _, part = page.partition("## Without a model")
    part, *_ = part.partition("\n## ")
    dispatch(["serve", "--help"])
    helped = " ".join(re.sub("│", "", capsys.readouterr().out).split())
    for policy in POLICIES:
        assert f"| `{policy}` |" in part
    for scheme in CATALOGUE.values():
        for policy, what in scheme.policies.items():
            assert f"{policy} ({what})" in helped
    for name in Script.__struct_fields__:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", part), name


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_table_opens(policy: str) -> None:
    assert open_backend(POLICIES[policy], RENDERER, get_env).name == POLICIES[policy]


def test_a_checkpoint_is_served_before_it_is_opened() -> None:
    with pytest.raises(ConfigError, match="expected the address of its server"):
        open_backend("embedded:/models/a", RENDERER, get_env)


async def test_a_users_backend_is_found_by_its_scheme_probed_and_named_as_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"echo": "echoes:Echo", "broken": "echoes:broken"}
    with installed(
        tmp_path, "echoes", {"echoes.py": ECHO}, {"prorl.backends": points}, monkeypatch
    ):
        assert backend("echo://host:1") == "echo://host:1"
        opened = await open_probed("echo://host:1", RENDERER, get_env)
        assert (opened.name, type(opened).__name__) == ("echo://host:1", "Echo")
        with pytest.raises(BackendError, match="backend_protocol: its logprobs are raw"):
            await open_probed("echo:raw", RENDERER, get_env)
        with pytest.raises(ConfigError, match="backend 'broken' cannot be made: RuntimeError"):
            open_backend("broken:", RENDERER, get_env)
        with pytest.raises(ConfigError, match=r"'ekko:x'.*echo:\.\.\..*prorl\.backends"):
            open_backend("ekko:x", RENDERER, get_env)


def test_no_other_file_decides_by_a_scheme() -> None:
    schemes = "|".join(CATALOGUE)
    scheme = re.compile(rf"""(startswith|removeprefix)\(\(?["']({schemes}):""")
    found = {
        str(path.relative_to(ROOM))
        for folder in ("backends", "cli", "deploy", "service", "supervisor", "stages")
        for path in (ROOM / folder).rglob("*.py")
        if scheme.search(path.read_text())
    }
    assert not found
