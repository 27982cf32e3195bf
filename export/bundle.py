"""A bundle on disk: opened with checks of schema, paths and sizes, verified by hash, written whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from adx.export.bundle_swap import Workspace, put_in_place, remove_leftovers
from adx.export.errors import AdxError, BundleError, OutputExistsError, UsageError
from adx.export.interrupt import deferred
from adx.export.manifest import MANIFEST_NAME, FileRecord, Manifest, from_json, to_json
from adx.export.manifest_json import parse_object

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_BLOCK = 1 << 22
_MANIFEST_LIMIT = 1 << 26


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Bundle:
        """Read a bundle's manifest and check every file's presence and size; hashes are `verify_files`'s to check.

        Raises:
            BundleError: it is no bundle, has another schema, names a path outside itself, or a file is missing or
                has another size.
        """
        folder = Path(path)
        manifest = from_json(_manifest_text(folder))
        for record in manifest.files:
            _check_file(folder, record)
        return Bundle(folder, manifest)

    def file(self, name: str) -> Path:
        """Where a listed file lies.

        Raises:
            BundleError: the manifest does not list it.
        """
        found = self.find(name)
        if found is None:
            raise BundleError(f"{self.path}: the bundle holds no {name}")
        return found

    def find(self, name: str) -> Path | None:
        """Where a file lies, or None if the manifest does not list it: a file put there later is not the bundle's."""
        return self.path / name if any(record.path == name for record in self.manifest.files) else None

    def total_bytes(self) -> int:
        """Bytes of all files, the manifest's own included."""
        return (self.path / MANIFEST_NAME).stat().st_size + sum(record.size for record in self.manifest.files)

    def problems(self, progress: Progress | None = None) -> list[str]:
        """One line for each file that is missing or changed; empty for a sound bundle."""
        total = sum(record.size for record in self.manifest.files)
        done, found = 0, []
        for record in self.manifest.files:
            try:
                _check_file(self.path, record)
                actual = file_sha256(self.path / record.path)
            except BundleError as error:
                found.append(str(error))
            else:
                if actual != record.sha256:
                    found.append(
                        f"{record.path}: sha256 is {actual}, but the manifest says {record.sha256}: "
                        f"{_remedy(self.path, record.path)}"
                    )
            done += record.size
            if progress:
                progress(done, total)
        return found

    def verify_files(self, progress: Progress | None = None) -> None:
        """Compare every file with its size and hash.

        Raises:
            BundleError: files are missing or changed; the message names each.
        """
        if found := self.problems(progress):
            raise BundleError(f"{self.path}: {len(found)} file(s) missing or changed: " + "; ".join(found))


def refresh_files(path: str | os.PathLike[str]) -> Bundle:
    """Rewrite the manifest's file list from what lies in the folder now, after a change made on purpose.

    Raises:
        BundleError: it is no bundle.
    """
    folder = Path(path)
    manifest = from_json(_manifest_text(folder))
    manifest = dataclasses.replace(manifest, files=tuple(_record(folder, file) for file in _walk(folder)))
    (folder / MANIFEST_NAME).write_text(to_json(manifest), encoding="utf-8")
    return Bundle.open(folder)


class BundleWriter:
    """Write a bundle beside its final place, then move it there in one step.

    A context manager: inside the block files go under `folder`, and `commit` puts the bundle in place. Leaving the
    block without `commit`, by an exception or (under `adx.export.interrupt.interruptible`) a signal, leaves nothing
    behind, and an OUT that was there before stays as it was. What a killed process left is removed by the next writer
    of the same OUT.

    Attributes:
        folder: where to write, on the file system of OUT; valid inside the block.
        out: the final place.

    Raises:
        OutputExistsError: OUT is there and `force` is not given.
        UsageError: with `force`, OUT is something other than a bundle or an empty folder, or cannot be created.
    """

    def __init__(self, out: str | os.PathLike[str], *, force: bool = False) -> None:
        self.out = Path(os.path.realpath(out))
        self.force = force
        self._workspace: Workspace | None = None

    @property
    def folder(self) -> Path:
        """The folder to write to."""
        assert self._workspace is not None, "BundleWriter.folder is there inside the with block only"
        return self._workspace.folder

    def __enter__(self) -> BundleWriter:
        check_output(self.out, force=self.force)
        try:
            with deferred():
                self.out.parent.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.out)
                self._workspace = Workspace.create(self.out)
        except OSError as error:
            raise UsageError(
                f"cannot write beside {self.out}: {error.strerror or error}: choose an output folder in a place that "
                "can be written to"
            ) from error
        except KeyboardInterrupt:  # it came while the workspace was made: no __exit__ will follow
            if self._workspace:
                self._workspace.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is None:
            return
        full = is_disk_full(error)
        written = sum(file.stat().st_size for file in _walk(workspace.folder)) if full else 0
        free = shutil.disk_usage(self.out.parent).free if full else 0
        with deferred():
            workspace.remove()
        if full:
            name = getattr(error, "filename2", None) or getattr(error, "filename", None) or workspace.folder
            raise AdxError(
                f"no space left on the disk of {self.out.parent} while writing {name}: it failed with "
                f"{_size(written)} written and {_size(free)} free. Nothing was left behind: free some space, or choose "
                "an output folder on another disk"
            ) from error

    def commit(self, manifest: Manifest, progress: Progress | None = None) -> Manifest:
        """Hash every file under `folder`, write the manifest last, and move the bundle to its final place.

        Args:
            manifest: its `files` are replaced by what lies under `folder`.
            progress: called with bytes hashed and bytes in all.

        Returns:
            The manifest as it was written.

        Raises:
            OutputExistsError: OUT appeared meanwhile.
            BundleError: the manifest names a file that was not written.
        """
        folder = self.folder
        files = list(_walk(folder))
        total = sum(file.stat().st_size for file in files)
        records: list[FileRecord] = []
        for file in files:
            records.append(_record(folder, file))
            _fsync(file)
            if progress:
                progress(sum(record.size for record in records), total)
        if not records:
            raise BundleError(f"nothing was written for {self.out}")
        manifest = dataclasses.replace(manifest, files=tuple(records))
        target = folder / MANIFEST_NAME
        target.write_text(to_json(manifest), encoding="utf-8")
        _fsync(target)
        for parent in {folder, *(file.parent for file in files)}:
            _fsync(parent)
        with deferred():
            check_output(self.out, force=self.force)
            put_in_place(folder, self.out)
            _fsync(self.out.parent)
        return manifest


def check_output(out: Path, *, force: bool) -> None:
    """Whether OUT may be written; nothing is changed. An export asks before its long work.

    Raises:
        OutputExistsError: OUT is there and `force` is not given.
        UsageError: with `force`, OUT is neither a bundle nor an empty folder.
    """
    if not os.path.lexists(out):
        return
    if not force:
        raise OutputExistsError(f"{out} exists already: choose another -o/--output, or replace it with --force")
    if out.is_dir() and (not any(out.iterdir()) or _looks_like_bundle(out)):
        return
    raise UsageError(
        f"{out} exists and is not an adx bundle, so --force does not replace it: remove it yourself, or choose another "
        "-o/--output"
    )


def check_free_space(out: str | os.PathLike[str], needed: int) -> None:
    """Whether the file system that OUT will lie on has `needed` bytes free.

    Raises:
        AdxError: it has not; the message has both figures.
    """
    place = Path(os.path.realpath(out))
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise AdxError(
            f"this needs about {_size(needed)} on the disk of {place}, and {_size(free)} are free: free some "
            "space, or choose an output folder on another disk"
        )


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception says that the disk is full; libraries written in Rust or C++ say it in words only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, Exception) and "No space left on device" in str(error)


def _manifest_text(folder: Path) -> str:
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise BundleError(f"{folder} {what}; give the folder that adx export wrote")
    if not path.is_file():
        hint = "run: adx export MODEL -o OUT"
        if (folder / "config.json").is_file():
            hint = f"it looks like a Hugging Face checkpoint; run: adx export {folder} -o OUT"
        raise BundleError(f"{folder} is not an adx bundle (no {MANIFEST_NAME} in it): {hint}")
    if path.stat().st_size > _MANIFEST_LIMIT:
        raise BundleError(f"{path} is larger than {_size(_MANIFEST_LIMIT)}, which no manifest is")
    if path.stat().st_size == 0:
        raise BundleError(f"{path} is empty: the bundle was not copied whole; copy it again")
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error


def _looks_like_bundle(folder: Path) -> bool:
    try:
        return "schema_version" in parse_object(_manifest_text(folder), MANIFEST_NAME)
    except BundleError:
        return False


def _check_file(folder: Path, record: FileRecord) -> None:
    path = folder / record.path
    root = os.path.realpath(folder)
    real = os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise BundleError(f"{record.path} is a link that leads out of the bundle, which is refused")
    if not os.path.isfile(real):
        raise BundleError(f"{record.path} is missing from the bundle {folder}: {_remedy(folder, record.path)}")
    size = os.path.getsize(real)
    if size != record.size:
        raise BundleError(
            f"{record.path} has {size} bytes, but the manifest says {record.size}: {_remedy(folder, record.path)}"
        )


def _walk(folder: Path) -> Iterator[Path]:
    """Every file under a folder but its manifest, in a fixed order."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path != folder / MANIFEST_NAME:
                yield path


def _record(folder: Path, file: Path) -> FileRecord:
    return FileRecord(file.relative_to(folder).as_posix(), file.stat().st_size, file_sha256(file))


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    """Push a file's or a folder's content to the disk; Windows has no such call for folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _remedy(folder: Path, path: str) -> str:
    """What to do about a damaged file: plans can be built from the rest of the bundle."""
    plan = re.fullmatch(r"engines/(tensorrt[a-z-]*)/(sm\d+)/.*", path)
    if plan is None:
        return "export or copy it again"
    return f"copy it again, or build it again: adx compile {folder} --target {plan[1]} --sm {plan[2]}"
