"""Ctrl-C and SIGTERM: half-written files are removed, and trained weights are saved."""

import os
import signal
import sys
import threading
from contextlib import suppress


# Signals that end a training.
SIGNALS = {signal.SIGINT, signal.SIGTERM}
NOTED = "\nThe step under way is finished and saved first. Once more ends it at once.\n"


def end_on_sigterm():
    """Let SIGTERM end this process by SystemExit, so that half-written files are removed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Interruption:
    """Within, the first of `SIGNALS` is noted, for a training to end after its step. A second one ends the process as
    ever.

    Outside the main thread, where Python allows no handlers, signals do what they always do.
    """

    def __init__(self):
        self.received, self._before = 0, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, _):
        self.received = number
        self.__exit__()
        # A step may take minutes. Buffered streams may be in the middle of a write when a signal comes.
        with suppress(OSError):
            os.write(2, NOTED.encode())

    def end(self):
        """End as the signal that was received does: by `KeyboardInterrupt`, or with its exit code."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)


def leave_interruptions_to_the_main_process(_: int = 0):
    """Ignore Ctrl-C in a process that decodes images: it reaches that, too, and the main process still needs its
    images."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
