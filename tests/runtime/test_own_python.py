"""Command lines of Python programs that belong to this installation."""

import subprocess
from pathlib import Path

from router.runtime.own_python import python_command


def test_no_file_in_the_working_folder_is_taken_for_a_module(tmp_path: Path) -> None:
    """Neither one with the name of the program nor one with that of a module of Python."""
    for name in ("router", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    command = [*python_command("router"), "--version"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
