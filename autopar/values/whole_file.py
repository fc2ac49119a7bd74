"""A file that is written is there whole, or is what it was: a disk may fill up, and a process may be killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Where to write what will be the file at `path`: a new file beside it, which takes its name when all is on disk.

    A link stays a link; what is no file (a pipe, /dev/stdout) is written to itself.

    Raises:
        OSError: as writing does; then the file is what it was.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        yield final
        return
    part = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        if final.exists():
            shutil.copymode(final, part)
        part.replace(final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a text (UTF-8) or bytes."""
    with whole_file(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)
