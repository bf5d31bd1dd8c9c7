"""The end of a server's process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading
from flightedl.coordination.process import end_process

atexit.register(print, "the interpreter was taken down")
threading.Thread(target=threading.Event().wait).start()
sys.stdout.write("all is said")
sys.stderr.write("also why")
end_process(75)
"""


def test_it_ends_at_once_whatever_threads_do_and_says_all_that_it_had_to() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "all is said", "also why")
