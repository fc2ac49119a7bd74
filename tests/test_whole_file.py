"""What is written is there whole, or what was there before: an error, a full disk or a kill in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.values.whole_file import whole_file, write_whole


def test_what_was_there_stays_until_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_whole(file, "old")
    with pytest.raises(OSError, match="No space"), whole_file(file) as part:
        part.write_text("ne")
        assert file.read_text() == "old"
        raise OSError(28, "No space left on device")
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"] and file.read_text() == "old"
    with whole_file(file) as part:
        part.write_text("new")
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"] and file.read_text() == "new"


def test_a_killed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_whole(file, b"old")
    code = f"""
import os, signal
from autopar.values.whole_file import whole_file
with whole_file({str(file)!r}) as part:
    part.write_text("ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert file.read_text() == "old"


def test_links_stay_links_and_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "through")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "through"
    write_whole(os.devnull, "nothing")
    assert not Path(os.devnull).is_file()
    mode = (tmp_path / "file").stat().st_mode & 0o777
    plain = tmp_path / "plain"
    plain.write_text("")
    assert mode == plain.stat().st_mode & 0o777


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "nowhere" / "file", "text")
