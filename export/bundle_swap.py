"""The temporary sibling of an output folder: owned by a process, swapped into place, recognised when left behind."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from adx.export.errors import OutputExistsError

_OWNER = ".owner"
_AT_FDCWD = -100  # Linux: paths relative to the working folder
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class Workspace:
    """A temporary folder beside OUT, and the marker file beside it that names the process it belongs to.

    The marker is there before the folder and goes after it, so that whatever a killed process leaves is recognised.
    """

    folder: Path
    marker: Path

    @staticmethod
    def create(out: Path) -> Workspace:
        """A new empty one beside `out`: `.OUT.adx-XXXXXXXX`."""
        descriptor, name = tempfile.mkstemp(prefix=_prefix(out), suffix=_OWNER, dir=out.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}, stream)
        marker = Path(name)
        folder = marker.with_name(marker.name.removesuffix(_OWNER))
        folder.mkdir()
        return Workspace(folder, marker)

    def remove(self) -> None:
        """Remove what is left of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.marker.unlink(missing_ok=True)


def put_in_place(folder: Path, out: Path) -> None:
    """Move a finished folder to `out`. An old `out` ends up under `folder`'s name, for the caller to remove.

    Where the system can exchange two names in one step (Linux) there is no moment without an `out`. Elsewhere the old
    one is moved aside first, and back if the second move fails.

    Raises:
        OutputExistsError: something that cannot be replaced appeared at `out` meanwhile.
    """
    if not out.exists():
        try:
            os.rename(folder, out)
        except OSError as error:
            raise OutputExistsError(f"{out} cannot be put in place: {error.strerror or error}") from error
        return
    if _exchange(folder, out):
        return
    aside = folder.with_name(folder.name + ".old")
    os.rename(out, aside)
    try:
        os.rename(folder, out)
    except BaseException:
        os.rename(aside, out)
        raise
    os.rename(aside, folder)


def remove_leftovers(out: Path) -> None:
    """Remove the workspaces of `out` whose processes are gone, and put back an old OUT that one had moved aside."""
    for marker in out.parent.glob(_escape(_prefix(out)) + "*" + _OWNER):
        if _owner_lives(marker):
            continue
        folder = marker.with_name(marker.name.removesuffix(_OWNER))
        aside = folder.with_name(folder.name + ".old")
        if aside.is_dir() and not os.path.lexists(out):
            os.rename(aside, out)
        shutil.rmtree(aside, ignore_errors=True)
        Workspace(folder, marker).remove()


def _prefix(out: Path) -> str:
    return f".{out.name}.adx-"


def _escape(text: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def _owner_lives(marker: Path) -> bool:
    """Whether the process that a marker names may still run; one of another machine may."""
    try:
        owner = json.loads(marker.read_text(encoding="utf-8"))
        host, pid, started = owner["host"], int(owner["pid"]), float(owner["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # killed while it wrote the marker: the folder was not there yet
    if host != platform.node():
        return True
    actual = _started(pid)
    return actual is not None and abs(actual - started) < 1.0


def _started(pid: int) -> float | None:
    """When a process started (seconds since 1970), or None if there is none with this number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step (renameat2(2) of Linux); False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return int(call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))) == 0
