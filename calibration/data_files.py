"""The user's calibration data, read one document after another: text, JSON, Parquet, or a folder of these."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.calibration.documents import (
    EMPTY,
    NOT_JSON,
    NOT_UTF8,
    PIECE,
    WRONG_TYPE,
    Document,
    Skipped,
    Text,
    document_of,
    pieces_of,
)
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
ACCEPTED = (
    ".txt and .md (a file is one document), .jsonl and .json (objects with a string under `text`, or with `messages`: "
    "a list of objects with `role` and `content`), .parquet (a column `text` or `messages`), or a folder of these, "
    "in UTF-8"
)
_BATCH = 64  # rows of a Parquet file that are decoded at a time
_MARK = b"\xef\xbb\xbf"


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of a file, or of a folder's files in the order of their names.

    They are read as they are asked for: one is in memory at a time, and of a text file a piece. A `.json` file that
    holds a list is read whole.

    Raises:
        UsageError: as `check_data`, or a file cannot be read.
    """
    check_data(path)
    readers = {".txt": _text, ".md": _text, ".jsonl": _lines, ".json": _json, ".parquet": _parquet}
    for file in _files(path):
        if isinstance(file, Skipped):
            yield file
            continue
        try:
            yield from readers[file.suffix.lower()](file, file.relative_to(path if path.is_dir() else path.parent))
        except OSError as error:  # pyarrow's errors are of this kind or of ValueError, and made one of ours there
            raise UsageError(f"calibration data {file} cannot be read: {error}") from error


def check_data(path: Path) -> None:
    """Whether a file or a folder can be read as calibration data, as far as can be seen without reading it.

    Raises:
        UsageError: it is not there, of no known type, empty, not readable, or needs a package that is missing.
    """
    try:
        there = path.exists()
    except OSError as error:
        raise UsageError(f"calibration data {path} cannot be read: {error}") from error
    if not there:
        raise UsageError(f"calibration data {path} is not there: give a file or a folder")
    found = list(_files(path))
    files = [file for file in found if isinstance(file, Path)]
    if not files:
        named = [Path(item.where).name for item in found if isinstance(item, Skipped)]
        others = ""
        if path.is_dir():
            more = " and more" if len(named) > 5 else ""
            others = f" (it holds {', '.join(named[:5])}{more})" if named else " (the folder is empty)"
        raise UsageError(f"calibration data {path}: nothing to read{others}; accepted are {ACCEPTED}")
    try:
        for file in files:
            with file.open("rb"):
                pass
            if file.suffix.lower() == ".parquet":
                _open_parquet(file).close()
    except OSError as error:
        raise UsageError(f"calibration data {file} cannot be read: {error}") from error
    if not any(file.stat().st_size for file in files):
        raise UsageError(f"calibration data {path} is empty; accepted are {ACCEPTED}")


def _files(path: Path) -> Iterator[Path | Skipped]:
    """The files that are read, and what is passed over: hidden entries, links to folders, other types."""
    if not path.is_dir():
        yield _checked(path, path.name)
        return
    for folder, folders, names in os.walk(path, onerror=_refuse):
        here = Path(folder)
        for name in sorted(folders):
            if name.startswith(".") or (here / name).is_symlink():
                reason = "hidden" if name.startswith(".") else "a link to a folder"
                yield Skipped((here / name).relative_to(path).as_posix(), reason)
                folders.remove(name)
        folders.sort()
        for name in sorted(names):
            where = (here / name).relative_to(path).as_posix()
            yield Skipped(where, "hidden") if name.startswith(".") else _checked(here / name, where)


def _checked(file: Path, where: str) -> Path | Skipped:
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        return Skipped(where, f"of type {suffix}" if suffix else "of no type")
    return file if file.is_file() else Skipped(where, "no regular file")


def _refuse(error: OSError) -> None:
    raise UsageError(f"calibration data {error.filename} cannot be read: {error.strerror}") from error


def _text(path: Path, name: Path) -> Iterator[Document]:
    where = name.as_posix()
    empty = True
    try:
        for block in _blocks(path):  # read through first: a document is used whole or not at all
            empty = empty and not block.strip()
    except UnicodeDecodeError:
        yield Skipped(where, NOT_UTF8)
        return
    yield Skipped(where, EMPTY) if empty else Text(where, _blocks(path))


def _blocks(path: Path) -> Iterator[str]:
    """A text file in pieces, as `pieces_of`."""
    rest = ""
    with path.open(encoding="utf-8-sig") as file:
        while block := file.read(PIECE):
            *whole, rest = pieces_of(rest + block)
            yield from whole
    yield rest


def _lines(path: Path, name: Path) -> Iterator[Document]:
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # at line feeds alone: other separators may stand inside a string
            line = line.removeprefix(_MARK) if number == 1 else line
            if line.strip():
                empty = False
                where = f"{name.as_posix()}, line {number}"
                value = _parsed(line, where)
                yield value if isinstance(value, Skipped) else document_of(value[0], where)
    if empty:
        yield Skipped(name.as_posix(), EMPTY)


def _json(path: Path, name: Path) -> Iterator[Document]:
    """Lines, one object, or a list of objects."""
    where = name.as_posix()
    with path.open("rb") as file:
        first = next((line for line in (each.removeprefix(_MARK).strip() for each in file) if line), b"")
    if not first:
        yield Skipped(where, EMPTY)
        return
    listed = first.startswith(b"[")
    if not listed and not isinstance(_parsed(first, where), Skipped):
        yield from _lines(path, name)
        return
    value = _parsed(path.read_bytes().removeprefix(_MARK), where)
    if isinstance(value, Skipped):
        if listed:
            yield value
        else:
            yield from _lines(path, name)
    elif value[0] == []:
        yield Skipped(where, EMPTY)
    elif isinstance(value[0], list):
        yield from (document_of(item, f"{where}, item {number}") for number, item in enumerate(value[0], 1))
    else:
        yield document_of(value[0], where)


def _parsed(line: bytes, where: str) -> tuple[Any] | Skipped:
    """The value that a piece of JSON holds."""
    try:
        return (json.loads(line.decode()),)
    except UnicodeDecodeError:
        return Skipped(where, NOT_UTF8)
    except (ValueError, RecursionError):
        return Skipped(where, NOT_JSON)


def _parquet(path: Path, name: Path) -> Iterator[Document]:
    import pyarrow

    number = 0
    try:
        with _open_parquet(path) as table:
            columns = [column for column in ("text", "messages") if column in table.schema_arrow.names]
            for batch in table.iter_batches(_BATCH, columns=columns, use_threads=False):
                for row in range(batch.num_rows):
                    number += 1
                    where = f"{name.as_posix()}, row {number}"
                    try:
                        value = {column: batch.column(column)[row].as_py() for column in columns}
                    except UnicodeDecodeError:
                        yield Skipped(where, NOT_UTF8)
                        continue
                    except (ValueError, OverflowError):  # what Python has no value for, as a time in nanoseconds
                        yield Skipped(where, WRONG_TYPE)
                        continue
                    yield document_of(value, where)
    except pyarrow.ArrowException as error:
        raise UsageError(f"calibration data {path} cannot be read after row {number}: {error}") from error
    if not number:
        yield Skipped(name.as_posix(), EMPTY)


def _open_parquet(path: Path) -> ParquetFile:
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            f"calibration data {path}: Parquet is read with pyarrow, which is not installed: "
            "`pip install 'adx-toolchain[parquet]'` brings it"
        )
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UsageError(f"calibration data {path} is not Parquet, or is damaged: {error}") from error
    names = table.schema_arrow.names
    if any(names.count(name) > 1 for name in ("text", "messages")):
        table.close()
        raise UsageError(f"calibration data {path}: it has two columns of one name: {', '.join(names)}")
    if not {"text", "messages"} & set(names):
        table.close()
        raise UsageError(
            f"calibration data {path}: a column `text` or `messages` is needed, and its columns are {', '.join(names)}"
        )
    return table
