"""The commands that edit the clients file change what they are asked to change and nothing else."""

import stat
from pathlib import Path

import pytest

from router.auth import key_edits
from router.auth.keys_file import hash_of, load, parse
from router.cli.main import main
from router.errors import ConfigError

COMMENTED = f"""\
# Who may call.
groups:
  research: {{weight: 4}}   # four shares

clients:
  # the first
  alice:
    key: "sha256:{"a" * 64}"   # of last year
    weight: 2

  bob: {{key: "sha256:{"b" * 64}", weight: 3}}  # in braces
# and now for the others
anonymous:
  allowed: true
prices:
  currency: EUR   # one for all
  models: {{llama: {{input: 0.20, output: 0.60}}}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "clients.yaml"
    path.write_text(COMMENTED)
    return path


def test_a_new_client_is_inserted_after_the_others(path: Path) -> None:
    """All lines, comments included, are kept, and the file holds the new key's hash instead of the key."""
    fields = {"weight": "2.5", "group": "research", "limits.in_flight": "4"}
    key = key_edits.add(path, "carol", fields, ["m", 'with "quotes"'])
    text = path.read_text()
    at = text.index("  carol:")
    assert text.index("bob:") < at < text.index("# and now")
    assert set(COMMENTED.splitlines()) <= set(text.splitlines())
    carol = parse(text).clients["carol"]
    assert key.startswith("sk-")
    assert len(key) >= 43 + 3
    assert key not in text
    assert load(path).keys[carol.key[0].digest].identity.client == "carol"
    assert hash_of(key) in text
    assert (carol.weight, carol.group, carol.limits.in_flight) == (2.5, "research", 4)
    assert carol.models == ("m", 'with "quotes"')


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing yet", "clients:\n", "clients: {}  # none\n", "clients:   # none\n\ngroups: {}\n"),
        *("anonymous: {}", "clients:\n    deep:\n        key: revoked\n", "clients:\n  a:\n", "groups: {}\nclients:"),
    ],
)
def test_a_client_finds_its_place_in_any_file(path: Path, text: str) -> None:
    """Two clients can be added to any valid file: empty, without clients, or without a last newline."""
    path.write_text(text)
    before = parse(text)
    for name in ("zoe", "zed"):
        key_edits.add(path, name, {}, [])
    after = parse(path.read_text())
    assert after.clients.keys() == before.clients.keys() | {"zoe", "zed"}
    assert path.read_text().count("#") == text.count("#")


def test_a_missing_file_is_created(tmp_path: Path) -> None:
    """The new file can be read by its owner alone."""
    path = tmp_path / "new.yaml"
    key_edits.add(path, "ann", {}, [])
    assert load(path).names.keys() == {"ann"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_a_revoked_key_is_refused(path: Path, name: str) -> None:
    """A revocation changes one line, and a rotation gives the client a new valid key."""
    path.chmod(0o644)
    old = load(path)
    key_edits.revoke(path, name)
    assert load(path).keys.keys() < old.keys.keys()
    assert load(path).names.keys() == old.names.keys()
    assert sum(a != b for a, b in zip(path.read_text().splitlines(), COMMENTED.splitlines(), strict=True)) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key_edits.rotate(path, name, 0.0, 0.0)
    assert len(load(path).keys) == 2


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_an_old_key_stays_valid_for_the_grace_period(path: Path, name: str) -> None:
    """After two rotations each old key has its own expiry, and expired keys are removed."""
    first = parse(COMMENTED).clients[name].key[0].digest
    second = key_edits.rotate(path, name, 100.0, 1000.0)
    third = key_edits.rotate(path, name, 100.0, 1050.0)
    keys = parse(path.read_text()).clients[name].key
    assert [key.until for key in keys] == [None, 1150.0, 1100.0]
    assert keys[2].digest == first
    assert [f"sha256:{key.digest.hex()}" for key in keys[:2]] == [hash_of(third), hash_of(second)]
    key_edits.rotate(path, name, 100.0, 1125.0)
    assert [key.until for key in parse(path.read_text()).clients[name].key] == [None, 1225.0, 1150.0]
    assert path.read_text().count("#") == COMMENTED.count("#")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("alice", {}, "alice already"),
        ("user-x", {}, "user-x"),
        ("x: y", {}, "not a valid name"),
        ("carol", {"group": "none"}, "no group 'none'"),
        ("carol", {"weight": "-1"}, "weight"),
        ("carol", {"expires": "soon"}, "not a time"),
    ],
)
def test_a_mistake_changes_nothing(path: Path, name: str, fields: dict[str, str], message: str) -> None:
    """The error names the mistake, and the file stays as it is."""
    with pytest.raises(ConfigError, match=message) as caught:
        key_edits.add(path, name, fields, [])
    assert path.read_text() == COMMENTED
    assert "clients.yaml" in str(caught.value) or name != "carol"


def test_a_wrong_file_is_not_changed(path: Path) -> None:
    """A file that is invalid, or written in a way that cannot be edited safely, is left unchanged."""
    for text in ("clients: {a: {key: revoked}}\n", "clients: 3\n", "clients: &x {}\ngroups: *x\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            key_edits.add(path, "carol", {}, [])
        assert path.read_text() == text


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    """The file behind a symbolic link is replaced, and the link stays."""
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    key_edits.add(link, "carol", {}, [])
    assert link.is_symlink()
    assert "carol" in load(path).names


def test_the_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`add` prints only the key, `list` shows all clients without keys, and a mistake is one line with exit code 2."""
    file = ["--file", str(path)]
    assert main(["keys", "add", "carol", "--weight", "2", "--group", "research", "--in-flight", "3", *file]) == 0
    key = capsys.readouterr().out.strip()
    assert hash_of(key) in path.read_text()
    assert main(["keys", "revoke", "alice", *file]) == 0
    assert main(["keys", "rotate", "bob", "--grace", "60", *file]) == 0
    assert capsys.readouterr().out.startswith("sk-")
    assert main(["keys", "list", *file]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()}
    assert rows["alice"][0] == "-"
    assert rows["carol"][1:4] == ["2", "research", "-"]
    assert "in_flight=3" in rows["carol"]
    for arguments in (["revoke", "nobody"], ["add", "alice"], ["rotate"], ["unknown"]):
        assert main(["keys", *arguments, *file]) == 2
        assert capsys.readouterr().err.startswith("d2lpm: ")
    path.write_bytes(b"\xff\xfe")
    assert main(["keys", "list", *file]) == 2
    assert capsys.readouterr().err == f"d2lpm: {path}: not UTF-8\n"


@pytest.mark.parametrize("grace", ["-1", "1e300", "nan", "an hour"])
def test_a_grace_that_has_no_end_in_the_calendar_is_refused(
    grace: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys stay as they are, and the line says which numbers are accepted."""
    before = path.read_text()
    assert main(["keys", "rotate", "bob", "--grace", grace, "--file", str(path)]) == 2
    assert "is not a number of seconds from 0 to 315360000" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_mistyped_name_is_answered_with_the_nearest_client(path: Path) -> None:
    """The file stays as it is, for a name that resembles one and for one that does not."""
    with pytest.raises(ConfigError, match=r"there is no client allice; did you mean alice\?$"):
        key_edits.revoke(path, "allice")
    with pytest.raises(ConfigError, match=r"there is no client zoe$"):
        key_edits.revoke(path, "zoe")
    assert path.read_text() == COMMENTED
