"""What observers measure, kept on disk: computed once for a model and its samples, and gone on with after a stop."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adx.calibration.forward import Progress, Tokens, observed, run_row
from adx.export.errors import CheckpointError
from adx.export.interrupt import deferred

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Arrays = Mapping[str, NDArray[Any]]

FORMAT = 1
SAVE_EVERY_S = 20.0
_LEAST_SHARE = 10  # a state is not saved before this many times as long as its last saving took
_HEADER, _PREFIX = "adx", "array/"
_ROWS, _FINISHED = "rows", "finished"


class Observer(Protocol):
    """Something that accumulates what goes into and comes out of linear layers."""

    @property
    def kind(self) -> str:
        """What it measures, with every parameter: two observers of one kind measure the same."""

    def observe(self, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """A layer's input (..., in) and output (..., out) in one piece of a row."""

    def row_done(self) -> None:
        """The row's last piece is through."""

    def state(self) -> dict[str, NDArray[Any]]:
        """All that was accumulated, at full precision; valid between rows, until the next one."""

    def restore(self, state: Arrays) -> None:
        """Go on from what `state` gave.

        Raises:
            KeyError, ValueError: it is no such state; the observer is as it was.
        """


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@dataclass(frozen=True)
class StatisticsStore:
    """A folder of `.npz` files by key; without a folder nothing is kept.

    A file is whole or absent: written beside its place, synced, then moved. One that cannot be read or written is no
    error, since all of it can be computed again.

    Attributes:
        folder: made at the first write.
        note: told in one sentence of each file that cannot be read or written.
        used: told in a few words of what is taken from a file.
        keys: what was asked for or saved.
    """

    folder: Path | None = None
    note: Callable[[str], None] = _warn
    used: Callable[[str], None] = lambda text: None
    keys: set[str] = field(default_factory=set)

    def load(self, key: str) -> dict[str, NDArray[Any]] | None:
        """What was saved under a key, or None: never saved, damaged, or not of this format."""
        self.keys.add(key)
        if self.folder is None or not os.path.lexists(self._file(self.folder, key)):
            return None
        path = self._file(self.folder, key)
        try:
            return _read(path, key)
        except MemoryError:
            raise
        except Exception as error:  # zipfile and numpy raise whatever they meet in a damaged file
            self.note(f"statistics {path} cannot be used ({_first_line(error)}): they are computed again")
            return None

    def save(self, key: str, arrays: Arrays) -> bool:
        """Keep arrays under a key of hexadecimal digits, in place of what was there; whether that worked."""
        self.keys.add(key)
        if self.folder is None:
            return False
        path = self._file(self.folder, key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder, key)
            _write(path, path.with_name(f".{key}.{os.getpid()}.tmp"), key, arrays)
        except OSError as error:
            self.note(f"statistics {path} cannot be saved ({_first_line(error)}): a later run computes them again")
            return False
        return True

    def clear(self) -> None:
        """Remove the files that were saved or used, as far as that works, and the folder if nothing else is in it."""
        if self.folder is None:
            return
        for key in self.keys:
            with suppress(OSError):
                self._file(self.folder, key).unlink()
        with suppress(OSError):
            self.folder.rmdir()

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / f"{key}.npz"


def collect(
    model: PreTrainedModel,
    rows: Iterable[Tokens],
    observer: Observer,
    *,
    store: StatisticsStore | None = None,
    digest: str = "",
    progress: Progress = lambda fraction: None,
    save_every_s: float = SAVE_EVERY_S,
    chunk: int | None = None,
) -> None:
    """Let an observer see every row, or take from the store what it saw before.

    Stopped in any way and called again it goes on after the last row that was saved, and gives the same result to the
    last bit.

    Args:
        rows: token ids. Without a store an iterator will do, and no more than one row is held.
        observer: a new one.
        digest: of the model as it is, weights and configuration; needed with a store.
        save_every_s: between two savings of an unfinished state, or longer where saving itself takes long.
        chunk: tokens of a piece, as in `run_row`.

    Raises:
        CheckpointError: NaN or infinity at a layer.
    """
    store, key = store or StatisticsStore(), ""
    if store.folder is not None:
        assert digest, "a store needs the model's digest"
        rows = list(rows)
        key = statistics_key(digest, rows, observer.kind, chunk)
    run = _Run(observer, store, key, save_every_s)
    if not run.restored():
        run.over(model, rows, progress, chunk)


class _Run:
    """One observer on its way through the rows."""

    def __init__(self, observer: Observer, store: StatisticsStore, key: str, save_every_s: float) -> None:
        self.observer, self.store, self.key, self.save_every_s = observer, store, key, save_every_s
        self.done = self.saved = 0  # rows
        self.between_rows = True
        self.next_save = time.monotonic() + save_every_s

    def restored(self) -> bool:
        """Take the stored state, if there is one; whether it is finished."""
        found = self.store.load(self.key)
        if found is None:
            return False
        try:
            done, finished = int(found.pop(_ROWS)), bool(found.pop(_FINISHED))
            self.observer.restore(found)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            self.store.note(f"statistics {self.key} are of another form ({error!r}): they are computed again")
            return False
        self.done = self.saved = done
        self.store.used("taken from an earlier run" if finished else f"going on after {done} rows of an earlier run")
        return finished

    def over(self, model: PreTrainedModel, rows: Iterable[Tokens], progress: Progress, chunk: int | None) -> None:
        total = length_hint(rows)
        try:
            with observed(model, self.observer.observe):
                for row in islice(rows, self.done, None):
                    if total:
                        progress(self.done / total)
                    self._row(model, row, chunk)
                    if time.monotonic() >= self.next_save:
                        self._save()
        except BaseException:
            # What stopped it in the middle of a row left half of that in the observer.
            if self.between_rows and self.done > self.saved:
                self._save()
            raise
        self._save(finished=True)

    def _row(self, model: PreTrainedModel, row: Tokens, chunk: int | None) -> None:
        with deferred():  # a signal waits for the row's end, where the state can be saved
            self.between_rows = False
            run_row(model, row, chunk)
            self.observer.row_done()
            self.done += 1
            self.between_rows = True

    def _save(self, finished: bool = False) -> None:
        if self.store.folder is None:
            self.next_save = float("inf")
            return
        begun = time.monotonic()
        with deferred():
            counts = {_ROWS: np.array(self.done), _FINISHED: np.array(finished)}
            self.store.save(self.key, {**self.observer.state(), **counts})
            self.saved = self.done
        ended = time.monotonic()
        self.next_save = ended + max(self.save_every_s, _LEAST_SHARE * (ended - begun))


def statistics_key(digest: str, rows: Iterable[Tokens], kind: str, chunk: int | None) -> str:
    """Sha256 of everything that statistics follow from: the model, the rows, how they ran, and what was measured."""
    parts = {
        "format": FORMAT,
        "model": digest,
        "rows": rows_digest(rows),
        "chunk": chunk,
        "observer": kind,
        **{name: version(name) for name in ("torch", "transformers")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def rows_digest(rows: Iterable[Tokens]) -> str:
    """Sha256 over each row's length and token ids, as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.array(len(row), "<i8").tobytes())
        digest.update(np.ascontiguousarray(row, "<i8").tobytes())
    return digest.hexdigest()


def fingerprint(arrays: Mapping[str, Any]) -> str:
    """Sha256 over names and what they stand for, numbers or arrays, in the order of names: for an observer's kind."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(f"{name}\0{array.dtype.str}{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def refuse_non_finite(name: str, value: float) -> None:
    """A figure that is NaN or infinite where any of its layer's values is.

    Raises:
        CheckpointError: it is.
    """
    if not np.isfinite(value):
        raise CheckpointError(
            f"the checkpoint itself gives NaN or infinity in PyTorch float32 (at layer {name}): nothing can be "
            "calibrated on it; download it again or use another"
        )


def _read(path: Path, key: str) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()  # before numpy takes a damaged header's word for a size
    if damaged:
        raise ValueError(f"{damaged} is damaged")
    with np.load(path, allow_pickle=False) as file:
        header = json.loads(str(file[_HEADER])) if _HEADER in file else None
        if header != _header(key):
            raise ValueError("it is not what adx saved there")
        return {name.removeprefix(_PREFIX): file[name] for name in file.files if name.startswith(_PREFIX)}


def _write(path: Path, temporary: Path, key: str, arrays: Arrays) -> None:
    members: dict[str, Any] = {_PREFIX + name: array for name, array in arrays.items()}
    members[_HEADER] = np.array(json.dumps(_header(key)))
    try:
        with temporary.open("wb") as stream:
            np.savez(stream, **members)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if os.name != "nt":  # Windows has no such call for folders
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _header(key: str) -> dict[str, Any]:
    return {"format": FORMAT, "key": key}


def _remove_leftovers(folder: Path, key: str) -> None:
    """Unfinished files of processes that were killed while they wrote."""
    import psutil

    for path in folder.glob(f".{key}.*.tmp"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
