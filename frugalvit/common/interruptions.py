"""SIGTERM."""

import signal
import sys
import threading


def end_on_sigterm():
    """Let SIGTERM end this process by SystemExit, so that half-written files are removed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
