"""The clients file is read again when it changes."""

import logging
import os
from pathlib import Path

import pytest

from router.auth.identity import ClientDirectory
from router.auth.key_watch import KeyWatch
from router.errors import ConfigError

ONE, TWO = "clients: {ann: {}}\n", "clients: {ann: {}, bob: {}}\n"


def names(directories: list[ClientDirectory]) -> list[set[str]]:
    return [set(directory.names) for directory in directories]


async def test_the_file_is_read_at_the_start_and_after_a_change() -> None:
    """Without a file the watch reads nothing."""
    directories: list[ClientDirectory] = []
    watch = KeyWatch(None, directories.append)
    await watch.reload_if_changed()
    assert not directories


async def test_a_change_is_seen_however_it_was_made(tmp_path: Path) -> None:
    """A change is noticed if the file is overwritten, and if another file of equal time and size replaces it."""
    path, directories = tmp_path / "clients", list[ClientDirectory]()
    path.write_text(ONE)
    watch = KeyWatch(path, directories.append)
    await watch.reload_if_changed()
    assert names(directories) == [{"ann"}]
    path.write_text(TWO)
    await watch.reload_if_changed()
    await watch.reload_if_changed()
    beside = tmp_path / "beside"
    beside.write_text(TWO.replace("bob", "cyd"))
    os.utime(beside, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    beside.replace(path)
    await watch.reload_if_changed()
    assert names(directories) == [{"ann"}, {"ann", "bob"}, {"ann", "cyd"}]


async def test_a_wrong_file_is_refused_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid, empty or missing file is logged once and keeps the old clients until the file is valid again."""
    path, directories = tmp_path / "clients", list[ClientDirectory]()
    path.write_text(ONE)
    watch = KeyWatch(path, directories.append)
    with caplog.at_level(logging.ERROR):
        path.write_text("clients:\n  ann: [\n")
        await watch.reload_if_changed()
        await watch.reload_if_changed()
        path.write_text("")
        await watch.reload_if_changed()
        path.unlink()
        await watch.reload_if_changed()
    assert names(directories) == [{"ann"}]
    assert len(caplog.messages) == 3
    assert all("clients" in line and "\n" not in line for line in caplog.messages)
    path.write_text(TWO)
    await watch.reload_if_changed()
    assert names(directories)[1:] == [{"ann", "bob"}]


def test_nothing_is_served_with_a_wrong_file(tmp_path: Path) -> None:
    """An invalid file at the start raises the error to the caller."""
    path, directories = tmp_path / "clients", list[ClientDirectory]()
    path.write_text("clients: 3")
    with pytest.raises(ConfigError, match="clients"):
        KeyWatch(path, directories.append)
    assert not directories


async def test_a_process_that_is_started_again_waits_for_a_mended_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mistake is logged, and does not keep it from starting."""
    path, directories = tmp_path / "clients", list[ClientDirectory]()
    path.write_text("clients: [")
    with pytest.raises(ConfigError):
        KeyWatch(path, directories.append)
    watch = KeyWatch(path, directories.append, goes_on=True)
    assert "no client is known" in caplog.text
    assert not directories
    path.write_text(ONE)
    await watch.reload_if_changed()
    assert names(directories) == [{"ann"}]
