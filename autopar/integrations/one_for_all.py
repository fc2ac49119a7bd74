"""How do ranks learn that what one of them does for all, such as writing a file, failed? They meet after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.runtime.agreement import agree, failing_together


@contextmanager
def one_for_all() -> Iterator[None]:
    """Let an error of the body on one rank be a RankError that names it on the others; all ranks call this."""
    with failing_together():
        yield
        agree({})
