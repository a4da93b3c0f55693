"""Ctrl-C and SIGTERM during training: the step is finished and saved first."""

import contextlib
import os
import signal
import threading


SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTED = "\nThe step under way is finished and saved first. Once more ends it at once.\n"


class Interruption:
    """A context in which the first of `SIGNALS` is noted. A second one ends the process as it always does.

    Outside the main thread, where Python allows no handlers, signals do what they always do.
    """

    def __init__(self):
        self.received, self._before = 0, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_):
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, _):
        self.received = number
        self.__exit__()
        # A step may take minutes. Buffered streams may be in the middle of a write when a signal comes.
        with contextlib.suppress(OSError):
            os.write(2, NOTED.encode())

    def end(self):
        """End as the signal that was received does: by `KeyboardInterrupt`, or with the exit code of SIGTERM."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)


def leave_interruptions_to_the_main_process(_: int = 0):
    """For a process that decodes images: Ctrl-C reaches it, too, and the main one still needs its images."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
