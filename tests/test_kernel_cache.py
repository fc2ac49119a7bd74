"""Kernels of the search are cached in the first place that can be written, and work where none can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from autopar.search.compiled import below, cache_folder, seeded
    assert 0 <= below(seeded(3), 10) < 10
print(cache_folder(), sum("AUTOPAR_CACHE" in str(one.message) for one in caught))
"""


def kept_in(**variables: str) -> tuple[str, int]:
    """The folder that a new process keeps kernels in, and how often it warned that there is none."""
    known = ("AUTOPAR_CACHE", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    env = {key: value for key, value in os.environ.items() if key not in known} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder, warned = done.stdout.rsplit(maxsplit=1)
    return folder, int(warned)


@pytest.fixture
def blocked(tmp_path: Path) -> str:
    """A folder that nobody can write to, not even root: it is a file."""
    (tmp_path / "blocked").write_text("")
    return str(tmp_path / "blocked")


def test_a_cache_that_is_named_serves_where_home_cannot_be_written(tmp_path: Path, blocked: str) -> None:
    folder, warned = kept_in(HOME=blocked, AUTOPAR_CACHE=blocked, NUMBA_CACHE_DIR=str(tmp_path / "own"))
    assert folder.startswith(str(tmp_path / "own")) and not warned
    assert list(Path(folder).rglob("*.nbi"))


def test_without_any_cache_kernels_work_and_a_warning_says_so(blocked: str) -> None:
    assert kept_in(HOME=blocked, XDG_CACHE_HOME=blocked) == ("None", 1)
