"""SIGINT and SIGTERM as one exception in the main thread, so that every clean-up runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from adx.export.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Signal(KeyboardInterrupt):
    """On its way up from the handler: no `except Exception` of a library on the way can swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Leave the block with `Interrupted` on SIGINT or SIGTERM, clean-ups run on the way out.

    Inside the block the exception is a `KeyboardInterrupt`. Only the first signal raises: the ones after it are
    ignored until the block is left, so that a second Ctrl-C does not stop a clean-up half way. In a thread other than
    the main one signals cannot be handled, and the block runs as it is.

    Raises:
        Interrupted: a signal came; `exit_code` is 130 for SIGINT, 143 for SIGTERM.
    """
    received: list[int] = []

    def raise_first(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            raise _Signal(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = [signal.getsignal(number) for number in SIGNALS]
    try:
        for number in SIGNALS:
            signal.signal(number, raise_first)
        yield
    except KeyboardInterrupt as error:
        signum = error.signum if isinstance(error, _Signal) else signal.SIGINT
        raise Interrupted(signum) from error
    finally:
        for number, handler in zip(SIGNALS, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Run the block to its end: a SIGINT or SIGTERM that comes meanwhile is delivered after it."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = [signal.getsignal(number) for number in SIGNALS]
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: received.append(signum))
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, previous, strict=True):
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
