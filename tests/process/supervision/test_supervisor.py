"""How many processes serve, and where the supervisor puts the sockets between them."""

import os
import stat
from pathlib import Path

import pytest

from router.config.settings import Settings
from router.errors import ConfigError
from router.process.supervision.supervisor import process_count, socket_folder


def test_auto_is_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the process may use; where the system does not say which these are, of all."""
    assert process_count(Settings(processes="auto")) == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process_count(Settings(processes="auto")) == os.cpu_count()
    assert process_count(Settings(processes=3)) == 3


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
