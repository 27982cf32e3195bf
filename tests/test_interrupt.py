"""Signals become one exception, its exit code is the shell's, and clean-ups run to their end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from adx.export.errors import Interrupted
from adx.export.interrupt import deferred, interruptible


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_becomes_interrupted_with_the_shells_exit_code(number: signal.Signals, code: int) -> None:
    with pytest.raises(Interrupted, match=number.name) as caught, interruptible():
        os.kill(os.getpid(), number)
    assert caught.value.exit_code == code


def test_a_library_that_swallows_exceptions_does_not_swallow_the_signal() -> None:
    reached = False

    def work() -> None:
        nonlocal reached
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:
                reached = True

    with pytest.raises(Interrupted):
        work()
    assert not reached


def test_a_second_signal_does_not_stop_the_clean_up() -> None:
    steps = []

    def work() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                steps.append("begun")
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("ended")

    with pytest.raises(Interrupted) as caught:
        work()
    assert steps == ["begun", "ended"]
    assert caught.value.exit_code == 143, "the first signal counts"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(), deferred():
        pass
    with pytest.raises(Interrupted), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_deferred_block_ends_before_the_signal_is_delivered() -> None:
    steps = []

    def work() -> None:
        with interruptible():
            with deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("whole")
            steps.append("not reached")

    with pytest.raises(Interrupted):
        work()
    assert steps == ["whole"]


def test_other_threads_run_the_block_as_it_is() -> None:
    """Python lets only the main thread set handlers; a worker thread must not fail for it."""
    steps: list[str] = []

    def work() -> None:
        with interruptible(), deferred():
            steps.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == ["done"]
