"""The interpreter waits for threads that end something, as their stop within C++ would abort it."""

import subprocess
import sys

SCRIPT = """
import os, threading, time
from bascule.comm import threads

class Slow:
    def __init__(self, name):
        self.is_asked, self.name = threading.Event(), name
        threads.start(self.run, name, self.end)

    def run(self):
        self.is_asked.wait()
        time.sleep(0.2)
        os.write(1, f"{self.name}\\n".encode())  # at once

    def end(self):
        self.is_asked.set()
        return 60.0

slow, later = Slow("slow"), Slow("later")
freed = Slow("freed")
threads.start(lambda: (time.sleep(0.2), os.write(1, b"last lines\\n")), "lines", freed.end)
freed.is_asked.set()
del freed
"""


def test_threads_end_before_the_interpreter_the_latest_first() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *first, later, slow = done.stdout.split("\n")[:-1]
    assert sorted(first) == ["freed", "last lines"] and (later, slow) == ("later", "slow")
