"""Memory that was freed is used again without a page fault, unless the user chose an allocator."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "autopar" / "runtime" / "allocator.py"
PROGRAM = f"""
import importlib.util, resource, sys
import numpy as np
spec = importlib.util.spec_from_file_location("allocator", {str(FILE)!r})
allocator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allocator)
told = sys.argv[1] == "keep" and allocator.keep_freed_memory()
for _ in range(3):
    blocks = [np.ones(6_000_000) for _ in range(2)]
    del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    blocks = [np.ones(6_000_000) for _ in range(2)]
    del blocks
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument: str, **environment: str) -> tuple[bool, int]:
    told = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", PROGRAM, argument]
    out = subprocess.run(command, env=told | environment, capture_output=True, text=True, timeout=60, check=True)
    kept, count = out.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_a_step_takes_no_memory_anew() -> None:
    pages = 10 * 48_000_000 // os.sysconf("SC_PAGE_SIZE")
    kept, few = faults("keep")
    assert kept and few < 0.05 * pages
    _, many = faults("as it is")
    assert many > 10 * few, "else there was nothing to keep"


def test_who_chose_an_allocator_keeps_it() -> None:
    assert not faults("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0]
