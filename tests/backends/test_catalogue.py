"""The table of URL schemes: every row opens, nothing else knows a scheme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prorl.backends import open_backend
from prorl.backends.catalogue import CATALOGUE
from prorl.backends.scripted import Script
from prorl.cli.app import dispatch
from prorl.cli.settings import POLICIES
from prorl.envs import get_env
from prorl.errors import ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer

RENDERER = ChatMLRenderer(ByteTokenizer())
ROOM = Path(__file__).parents[2] / "prorl"


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


def test_no_backend_is_code_of_a_user() -> None:
    with pytest.raises(ConfigError, match=r"'mine:x'; expected .*start a server that speaks"):
        open_backend("mine:x", RENDERER, get_env)


def test_no_other_file_decides_by_a_scheme() -> None:
    schemes = "|".join(CATALOGUE)
    scheme = re.compile(rf"""(startswith|removeprefix)\(\(?["']({schemes}):""")
    offenders = {
        str(path.relative_to(ROOM))
        for folder in ("backends", "cli", "deploy", "service", "supervisor", "stages")
        for path in (ROOM / folder).rglob("*.py")
        if scheme.search(path.read_text())
    }
    assert not offenders
