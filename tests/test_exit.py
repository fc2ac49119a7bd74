"""A process of a Gloo group ends after its backend's threads have put down what they hold."""

import os
import subprocess
import sys

PROGRAM = """
import sys, threading, time
from autopar.runtime import init
init(backend="gloo")

def put_down():
    time.sleep(0.05)
    sys.stdout.write("put down")
    sys.stdout.flush()

threading.Thread(target=put_down, daemon=True).start()
"""


def test_threads_have_time_before_the_interpreter_ends() -> None:
    """A daemon thread that still has to take the interpreter's lock stands for one of Gloo's."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | alone, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "put down"), done.stderr
