"""The folder of sockets: only its user can enter it, and no start leaves one of a dead router."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.process.supervision.socket_folder import socket_folder

MAKE_AND_DIE = """
import os, signal, sys
from router.process.supervision.socket_folder import socket_folder
with socket_folder(sys.argv[1]) as folder:
    os.mkdir(os.path.join(folder, "run"))
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_this_user_can_enter_the_folder_of_sockets(tmp_path: Path) -> None:
    """It is gone afterwards."""
    with socket_folder(str(tmp_path)) as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    assert not Path(folder).exists()


@pytest.mark.parametrize(("parent", "message"), [("x" * 100, "set TMPDIR"), ("missing", "No such file")])
def test_a_place_where_no_socket_can_be_is_a_mistake_in_one_line(parent: str, message: str, tmp_path: Path) -> None:
    """The path of a socket is short, and a folder for temporary files may be missing."""
    if parent != "missing":
        (tmp_path / parent).mkdir()
    with pytest.raises(ConfigError, match=message), socket_folder(str(tmp_path / parent)):
        pass


def test_a_start_removes_the_folder_of_a_router_that_was_killed(tmp_path: Path) -> None:
    """It stays until then, with all that is in it."""
    killed = subprocess.run([sys.executable, "-c", MAKE_AND_DIE, tmp_path], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert (left / "run").is_dir()
    with socket_folder(str(tmp_path)) as folder:
        assert [str(each) for each in tmp_path.iterdir()] == [folder]


def test_a_start_removes_no_folder_that_may_be_in_use(tmp_path: Path) -> None:
    """Neither that of a router that runs, nor one of which nobody can tell, nor what a link of that name leads to."""
    unknown, elsewhere = tmp_path / "d2lpm-unknown", tmp_path / "elsewhere"
    for each in (unknown, elsewhere):
        each.mkdir()
    (elsewhere / "owner").touch()
    (tmp_path / "d2lpm-link").symlink_to(elsewhere)
    with socket_folder(str(tmp_path)) as first:
        with socket_folder(str(tmp_path)):
            assert Path(first).is_dir()
        assert Path(first).is_dir()
    assert unknown.is_dir()
    assert (elsewhere / "owner").exists()


def test_a_start_leaves_the_folders_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if their routers are dead and this user could remove them."""
    left = tmp_path / "d2lpm-left"
    left.mkdir()
    (left / "owner").touch()
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    with socket_folder(str(tmp_path)):
        assert left.is_dir()
    monkeypatch.undo()
    with socket_folder(str(tmp_path)):
        assert not left.exists()
