"""Who tells a user why a trace failed? We do, in one sentence: inside `quiet`, torch neither logs nor prints its graph.

(Private torch API, kept in this file: the name by which `torch.export` prints.)
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.export import _trace


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, what torch would write about its own trace is left out; the model's own output is not."""
    names = [name for name in logging.root.manager.loggerDict if name == "torch" or name.startswith("torch.")]
    loggers = [log for log in map(logging.getLogger, names) if not log.disabled]
    with mock.patch.object(_trace, "print", lambda *_, **__: None, create=True), warnings.catch_warnings():
        # torch.export's own use of deprecated torch functions is not for our users to read
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        for log in loggers:
            log.disabled = True
        try:
            yield
        finally:
            for log in loggers:
                log.disabled = False
