"""Does a step on a CPU get its memory from the system anew, page by page? Not if the C library keeps what is freed.

glibc takes large blocks from the system one by one, gives them back as they are freed, and shrinks its heap. A step
frees its activations and gradients and takes them from the system again in the next, with a fault for every 4 KiB: a
twelfth of a step of data parallelism whose gradients take 60 MB. With both turned off it keeps them, as torch's
allocator of GPU memory does, and the process stays as large as it was at its peak. Other C libraries are left alone,
and so is one that was told in the environment what to do.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""mallopt(3): from how many free bytes on the heap shrinks (-1: never), how many blocks are taken beside the heap."""
TOLD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables with which a user chooses an allocator or its settings."""


def keep_freed_memory() -> bool:
    """From now on this process reuses the memory it frees; whether the C library was told so."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in TOLD):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
