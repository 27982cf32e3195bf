"""What TensorRT says during a build: kept in a file, its warnings once each, its errors apart from the noise."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from adx.export.errors import AdxError

SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")  # VERBOSE, thousands of lines a build, is not kept

# What a build without a GPU says at every turn: not why it failed.
_NO_DRIVER = re.compile(
    r"CUDA driver version is insufficient|no CUDA-capable device|cudaError (35|100)\b|Thread context has not been set"
)
# Kernels that were tried and left out for want of memory; the cause only where nothing else is said.
_OUT_OF_MEMORY = re.compile(r"out of memory|could not be allocated|Skipping tactic|OutOfMemory", re.IGNORECASE)
# Said of every graph or every process, and nothing follows from it.
_HARMLESS = re.compile(
    r"Make sure input .* has Int64 binding|Empty initializer .* was provided with non-empty data"
    r"|The logger passed into .* differs from one already"
)
_FIGURES = {
    "weights": re.compile(r"Total Weights Memory: (\d+) bytes"),
    "scratch": re.compile(r"Max Scratch Memory: (\d+) bytes"),
    "activation": re.compile(r"Total Activation Memory: (\d+) bytes"),
}


@dataclass
class BuildLog:
    """One build's words, appended to a file as they come.

    TensorRT prints and drops an exception out of a logger, so a file that cannot be written is reported on leaving.

    Attributes:
        path: the file; it may hold earlier builds.
        folder: where the graph is; it is left out of what is kept, which goes with the plan.
        errors: texts of the errors so far, in order.
        warnings: texts of the warnings, each once, without those that nothing follows from.
        figures: bytes of `weights`, `scratch` and `activation` memory, where the builder said them.
    """

    path: Path
    folder: Path
    errors: list[str] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    _file: IO[str] | None = None
    _failure: OSError | None = None

    def __enter__(self) -> BuildLog:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", errors="replace")
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as failure:
            self._failure = self._failure or failure
        if self._failure is not None and error is None:
            raise self._unwritable(self._failure) from self._failure

    def add(self, severity: str, text: str) -> None:
        """Take one message; never raises."""
        text = text.replace(f"{self.folder}/", "")
        for name, pattern in _FIGURES.items():
            if match := pattern.search(text):
                self.figures[name] = int(match[1])
        if severity not in SEVERITIES:
            return
        if severity == "WARNING" and not _HARMLESS.search(text):
            self.warnings.setdefault(one_line(text))
        elif severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(text)
        self._write(f"{severity} {one_line(text)}")

    def heading(self, text: str) -> None:
        """Say which build the lines after it are of."""
        self._write(f"BUILD {text}")

    def causes(self) -> list[str]:
        """The errors that can be why a build failed, each on one line, the last one last."""
        said = [one_line(text) for text in self.errors if not _NO_DRIVER.search(text)]
        return [text for text in said if not _OUT_OF_MEMORY.search(text)] or said

    def lacks_device(self) -> bool:
        """Whether an error says that there is no usable CUDA device."""
        return any(_NO_DRIVER.search(text) for text in self.errors)

    def _write(self, line: str) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        try:
            if self._file is not None and self._failure is None:
                self._file.write(f"{now} {line}\n")
        except OSError as error:
            self._failure = error

    def _unwritable(self, error: OSError) -> AdxError:
        return AdxError(
            f"the build log {self.path} cannot be written ({error.strerror}): free or allow the place for it"
        )


def make_logger(module: Any, log: BuildLog) -> Any:
    """An `ILogger` of `module`, the library's, that hands every message to `log`."""

    class Logger(module.ILogger):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, text: str) -> None:
            log.add(severity.name, text)

    return Logger()


def without_noise(text: str) -> str:
    """A message of several lines on one, without those that a machine without a GPU adds."""
    lines = [line for line in text.splitlines() if not _NO_DRIVER.search(line)]
    return one_line(" ".join(lines or [text]))


def one_line(text: str) -> str:
    """White space of any kind as single spaces."""
    return " ".join(text.split())
