"""Ctrl-C, SIGTERM and a terminal that closes: half-written files are removed, and trained weights are saved."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


# Signals that end a command, and what is said of them. Windows has no SIGHUP.
SIGNALS = {
    getattr(signal, name): text
    for name, text in {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "its terminal was closed"}.items()
    if hasattr(signal, name)
}
NOTED = "\nThe step under way is finished and saved first. Once more ends it at once.\n"


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Within, each of `SIGNALS` raises an exception, `KeyboardInterrupt` or `SystemExit` with 128 and the signal's
    number, so that files that are half written are removed. Signals that the process ignores (`nohup`) stay ignored.

    Yields:
        `list[int]`: The signals that were received: some libraries turn an interruption into an error of their own.
    """
    received, before = [], {}

    def end(number: int, _):
        received.append(number)
        leave_terminal(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)
    try:
        yield received
    finally:
        while before:
            signal.signal(*before.popitem())


def ending_of(error: BaseException, received: list[int]) -> int | None:
    """The signal behind an error, None if there was none; `received` is the list that `ended_by_signals` yields."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit):
        return next((number for number in SIGNALS if error.code == 128 + number), None)
    return received[-1] if received else None


def leave_terminal(number: int):
    """Write to nowhere from now on if the terminal was closed, as writing to it would be an error."""
    if number == getattr(signal, "SIGHUP", None):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None and stream.isatty():
                os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


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
        leave_terminal(number)
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
    for number in SIGNALS.keys() - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
