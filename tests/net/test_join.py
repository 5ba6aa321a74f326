"""Certificates and join files."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.errors import ConfigError, UserError
from prorl.net.bearer import Keys
from prorl.net.join import Join, ends_soon, new_join, prepare
from prorl.net.tls import ROLES, Authority, Caller, LiveCredentials, NodeKey

KEYS = Keys("owner", "x" * 64)

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")


def test_a_service_writes_a_join_file_for_each_role_readable_by_its_owner_only(
    tmp_path: Path,
) -> None:
    prepare(tmp_path, "https://h:1", KEYS)
    files = sorted((tmp_path / "join").iterdir())
    assert [file.stem for file in files] == sorted(ROLES[1:])
    private = [*files, tmp_path / "tls" / "authority.pem", tmp_path / "tls" / "service.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in private} == {0o600}


def test_join_files_stay_until_something_changes(tmp_path: Path) -> None:
    path = tmp_path / "join" / "trainer.json"
    prepare(tmp_path, "https://h:1", KEYS)
    before = path.read_text()
    prepare(tmp_path, "https://h:1", KEYS)
    assert path.read_text() == before
    prepare(tmp_path, "https://h:1", Keys("owner", "y" * 64))
    assert path.read_text() != before


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "join file"), ("[]", "other fields"), ('{"url": 1}', "other fields")],
)
def test_an_invalid_join_file_is_refused_in_a_single_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        Join.read(tmp_path / "x.json")


def test_an_ended_certificate_says_when_and_how_to_mend_it(tmp_path: Path) -> None:
    new_join(tmp_path, "trainer", "https://h:1", "t", days=-3).write(tmp_path / "old.json")
    with pytest.raises(ConfigError, match=r"ended 3 days ago.*copy it"):
        Join.read(tmp_path / "old.json")


def test_a_certificate_that_is_garbage_is_refused(tmp_path: Path) -> None:
    join = new_join(tmp_path, "trainer", "https://h:1", "t")
    replace(join, certificate="garbage").write(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="certificate that cannot be read"):
        Join.read(tmp_path / "bad.json")


def test_the_command_lists_join_files_and_when_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, "https://h:1", KEYS)
    path = tmp_path / "join" / "trainer.json"
    new_join(tmp_path, "trainer", "https://h:1", "t", days=-1).write(path)
    assert dispatch(["token", "--root", str(tmp_path)]) == 0
    assert "ended 1 days ago" in capsys.readouterr().out


def test_no_join_file_holds_the_owners_token_or_the_key_that_signs(tmp_path: Path) -> None:
    prepare(tmp_path, "https://h:1", KEYS)
    for path in (tmp_path / "join").iterdir():
        assert "owner" not in path.read_text()
        assert "x" * 64 not in path.read_text()
        assert KEYS.check(f"Bearer {Join.read(path).token}".encode()).role == path.stem


def test_credentials_about_to_expire_are_listed_and_renewed(tmp_path: Path) -> None:
    prepare(tmp_path, "https://h:1", KEYS)
    assert ends_soon(tmp_path) == {}
    own, path = tmp_path / "tls" / "service.json", tmp_path / "join" / "node.json"
    Authority.of(tmp_path / "tls").credentials("service", days=-2).write(own)
    new_join(tmp_path, "node", "https://h:1", "t", days=-1).write(path)
    live = LiveCredentials(own)
    before = live.current
    days_by_path = ends_soon(tmp_path)
    assert (round(days_by_path[str(own)]), round(days_by_path[str(path)])) == (-2, -1)
    prepare(tmp_path, "https://h:1", KEYS)
    assert ends_soon(tmp_path) == {}
    short = Authority.of(tmp_path / "tls").credentials("service", days=9)
    assert (round(short.lifetime_days), short.ends_soon) == (9, False), "three days before its end"
    assert live.current != before
    assert live.current.remaining_days() > 300
    assert live.current is live.current


def test_a_node_gets_a_certificate_that_names_it_for_a_key_that_stays_with_it(
    tmp_path: Path,
) -> None:
    authority, key = Authority.of(tmp_path), NodeKey()
    made = key.credentials(authority.sign(key.request("n7"), "n8"), authority.certificate)
    x509 = pytest.importorskip("cryptography.x509")
    certificate = x509.load_pem_x509_certificate(made.certificate.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert Caller.of(names.get_values_for_type(x509.DNSName)[0]) == Caller("node", "n8"), "not n7"
    assert 89 < made.remaining_days() <= 90
    made.server_context()
    for wrong in ("", "garbage", made.certificate, key.request("n7")[:300]):
        with pytest.raises(UserError, match="PKCS#10"):
            authority.sign(wrong, "n7")
