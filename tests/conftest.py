"""What every test shares: one thread, no network, and the warnings of other people's code that we cannot answer.

Warnings are errors (pyproject). A filter here names one message of one library and why it is not ours to fix.
"""

import gc
import logging
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the suite shares few cores with its own ranks
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configs; a test that downloads is a mistake

# Inductor asks which vector instructions run here by compiling for each of them; scalar code proves the same.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest

SHARED = "AUTOPAR_TEST_GRAPHS"
"""Names the folder in which workers of a run share the graphs that they traced (`tests/shared_graphs.py`)."""

FILTERS: tuple[str, ...] = ()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of this run inherit the folder
        os.environ[SHARED] = tempfile.mkdtemp(prefix="autopar-graphs-")
    for line in FILTERS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def copied_processes() -> None:
    """For tests of what starts processes itself: they are copies of the one that ranks are copies of."""
    from tests.process_group import begin_copying

    begin_copying()


def pytest_collection_finish() -> None:
    """What is imported stays. To look for cycles in it again and again took a seventh of all time.

    torch writes what it traces, every tensor and every graph, for whoever listens at a logger that passes nothing on,
    and pytest listens at all that do not: with it a capture took twice as long.
    """
    from tests.quick_export import quicken_export

    quicken_export()
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True)
