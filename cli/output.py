"""Where words go: results to stdout, progress and notes to stderr, never the two mixed."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsonlib
import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


def plain(value: object) -> Any:
    """A value as JSON can hold it: data classes as objects, arrays as lists, a number that is not finite as null.

    A value with a `to_dict` says itself which of its fields are shown.
    """
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return plain(value.tolist())
    return value


def to_json(value: object) -> str:
    """One line of JSON."""
    return jsonlib.dumps(plain(value), ensure_ascii=False, allow_nan=False)


class Output:
    """A command's stdout and stderr; while it is open, what libraries print goes to stderr.

    Args:
        json: one JSON object is the whole of stdout.
        level: -1 quiet, 0 normal, 1 verbose.
    """

    def __init__(self, *, json: bool, level: int = 0) -> None:
        self.json = json
        self.level = level
        self.stdout: TextIO = sys.stdout
        self.stderr: TextIO = sys.stderr
        self._redirect = contextlib.redirect_stdout(self.stderr)
        self._began = time.monotonic()
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Output:
        self._redirect.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_progress(completed=error is None)
        self._redirect.__exit__(kind, error, trace)

    def report(self, stage: str, fraction: float | None = None) -> None:
        """Show what is being done and, where known, which part of it is finished (0 to 1)."""
        if self.level < 0:
            return
        if self.stderr.isatty():
            self._report_bar(stage, fraction)
        elif stage != self._stage:
            self._stage = stage
            print(f"[{time.monotonic() - self._began:6.1f} s] {stage}", file=self.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if self.level >= 0:
            self._end_progress()
            print(text, file=self.stderr, flush=True)

    def error(self, text: str) -> None:
        """Why the exit code is not 0, where the result is printed all the same."""
        self._end_progress(completed=False)
        print(f"adx: error: {text}", file=self.stderr, flush=True)

    def detail(self, text: str) -> None:
        """A line on stderr if verbose."""
        if self.level > 0:
            self.note(text)

    def result(self, value: object, lines: Iterable[RenderableType]) -> None:
        """The command's result: `value` as one JSON object, or `lines` for people."""
        self._end_progress()
        if self.json:
            print(to_json(value), file=self.stdout, flush=True)
            return
        console = self._console()
        for line in lines:
            if isinstance(line, str):
                print(line, file=self.stdout)
            else:
                console.print(line)
        self.stdout.flush()

    def write(self, text: str) -> None:
        """A piece of streamed text, at once."""
        self._end_progress()
        self.stdout.write(text)
        self.stdout.flush()

    def _console(self) -> Console:
        from rich.console import Console

        return Console(
            file=self.stdout, width=None if self.stdout.isatty() else PLAIN_WIDTH, highlight=False, markup=False
        )

    def _report_bar(self, stage: str, fraction: float | None) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
            )
            self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(file=self.stderr))
            self._progress.start()
        if stage != self._stage or self._task is None:
            self._finish_task()
            self._stage = stage
            self._task = self._progress.add_task(stage, total=None)
        if fraction is not None:
            self._progress.update(self._task, total=1.0, completed=fraction)

    def _finish_task(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=1.0, completed=1.0)
            self._task = None

    def _end_progress(self, completed: bool = True) -> None:
        if self._progress is not None:
            if completed:
                self._finish_task()
            self._progress.stop()
            self._progress, self._task, self._stage = None, None, None
