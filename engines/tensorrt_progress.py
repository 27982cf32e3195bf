"""How far a build is, and how it is stopped: TensorRT builds in a thread of its own, this one watches.

TensorRT prints and drops an exception out of a callback, and a signal's handler runs in the main thread only. So the
callbacks keep numbers and answer whether to go on, and the main thread, which waits, reports and takes the signals.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from adx.export.interrupt import deferred

T = TypeVar("T")
Report: TypeAlias = Callable[[str, float | None], None]  # what is being done, and which part of it is finished (0 to 1)

TICK = 0.1  # seconds between two looks at a build
SETTLED = 2.0  # seconds before a rate is told from a phase
COUNTABLE = 10  # steps of a phase from which a rate is told


@dataclass
class _Phase:
    parent: str | None
    steps: int
    started: float
    done: int = 0


@dataclass
class BuildProgress:
    """The phases that a build is in, kept by its callbacks, read by whoever watches.

    Attributes:
        clock: seconds, for tests.
        cancelled: once set, the build ends at its next step.
    """

    clock: Callable[[], float] = time.monotonic
    cancelled: threading.Event = field(default_factory=threading.Event)
    _phases: dict[str, _Phase] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _furthest: float = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins; `parent` None: it is the whole build."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(steps, 1), self.clock())

    def step(self, name: str, step: int) -> bool:
        """A step, counted from 0, is done; False: stop the build."""
        with self._lock:
            if name in self._phases:
                self._phases[name].done = step + 1
        return not self.cancelled.is_set()

    def finish(self, name: str) -> None:
        """A phase ends, also where the build is stopped."""
        with self._lock:
            phase = self._phases.pop(name, None)
            if phase is not None and phase.parent is None and not self.cancelled.is_set():
                self._furthest = 1.0

    def fraction(self) -> float | None:
        """The finished part of the build; it never falls. None: the build has not begun."""
        with self._lock:
            roots = [name for name, phase in self._phases.items() if phase.parent is None]
            if roots:
                self._furthest = max(self._furthest, self._part(roots[0]))
            return self._furthest if roots or self._furthest else None

    def stage(self) -> str:
        """The innermost phase, and how long it will take yet, or how long it took where no rate can be told."""
        with self._lock:
            if not self._phases:
                return ""
            name, phase = list(self._phases.items())[-1]
            spent = self.clock() - phase.started
        words = name[:1].lower() + name[1:]
        if spent < SETTLED:
            return words
        if phase.steps >= COUNTABLE and 0 < phase.done < phase.steps:
            return f"{words}, about {spent * (phase.steps - phase.done) / phase.done:.0f} s more"
        return f"{words}, for {spent:.0f} s"

    def _part(self, name: str) -> float:
        phase = self._phases[name]
        inside = sum(self._part(child) for child, other in self._phases.items() if other.parent == name)
        return min(1.0, (phase.done + min(inside, 1.0)) / phase.steps)


def make_monitor(module: Any, progress: BuildProgress) -> Any:
    """An `IProgressMonitor` of `module`, the library's, that keeps `progress`."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()


def watch(work: Callable[[], T], progress: BuildProgress, report: Report, label: str) -> tuple[T, float]:
    """Run `work` in a thread of its own until it ends, and say how far it is.

    An exception in this thread (a signal's, or one out of `report`) stops the build at its next step, and goes on its
    way when the build has ended.

    Returns:
        What `work` returned, and the largest resident memory of the process meanwhile, in MB.
    """
    import psutil

    process = psutil.Process()
    ended = threading.Event()  # a signal in Thread.join makes Python before 3.13 take a running thread for finished
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below, in the thread that waits
            traceback.clear_frames(error.__traceback__)  # it must not keep the library's objects for who catches it
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="tensorrt-build")
    peak = process.memory_info().rss
    try:
        with deferred():
            thread.start()
        report(label, None)
        while not ended.wait(TICK):
            peak = max(peak, process.memory_info().rss)
            stage = progress.stage()
            report(f"{label}: {stage}" if stage else label, progress.fraction())
    except BaseException as error:
        progress.cancelled.set()
        try:
            if isinstance(error, KeyboardInterrupt):
                report(f"{label}: stopping at the builder's next step", None)
        finally:
            if thread.ident is not None:  # it did start
                ended.wait()
        raise
    thread.join()
    if errors:
        raise errors[0]
    report(label, progress.fraction())
    return results[0], peak / 1e6
