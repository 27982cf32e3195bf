"""A checkpoint's files before anything is loaded: JSON, safetensors headers, shards, pointers in place of files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adx.export.errors import CheckpointError, UnsupportedCheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

_LFS = b"version https://git-lfs.github.com/spec/"
_HEADER_LIMIT = 100_000_000  # the safetensors library's own
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file: where it is, its element type as the file spells it, its shape and bytes."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is not there, a git-lfs pointer, or holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing from {path.parent}")
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def refuse_pointer(path: Path) -> None:
    """Refuse the few lines of text that git leaves where git-lfs has not fetched a file.

    Raises:
        CheckpointError: `path` is such a pointer.
    """
    with path.open("rb") as stream:
        if stream.read(len(_LFS)) != _LFS:
            return
        rest = stream.read(400).decode("utf-8", "replace")
    size = next((line.split()[1] for line in rest.splitlines() if line.startswith("size ")), "unknown")
    raise CheckpointError(
        f"{path.name} is a git-lfs pointer of {path.stat().st_size} bytes, not the file itself ({size} bytes): run "
        "`git lfs pull` in the checkpoint, or download it again with `hf download`"
    )


def read_safetensors(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors that a safetensors file lists, after its size was compared with what they need.

    Raises:
        CheckpointError: it is no safetensors file, or truncated or longer than its header says.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= _HEADER_LIMIT:
            raise CheckpointError(f"{path.name} is not a safetensors file ({size} bytes): its header is damaged")
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name} is truncated: it has {size} bytes, and its header alone needs {8 + length}: download "
                "it again"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text.decode("utf-8"))
        tensors = tuple(_stored(name, path.name, entry) for name, entry in entries.items() if name != "__metadata__")
        end = max(
            (int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has a damaged safetensors header ({error}): download it again") from error
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "longer than it should be"
        raise CheckpointError(
            f"{path.name} is {what}: it has {size} bytes, and its header says {expected}: download it again"
        )
    return tensors


def named_weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the files that should hold a folder's weights, as transformers chooses them; they may be missing.

    Raises:
        CheckpointError: the index is damaged.
    """
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return (SINGLE,)
    return tuple(sorted(set(_weight_map(folder).values())))


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files that hold a folder's weights, all of them there.

    Raises:
        CheckpointError: a shard is missing, or there are no weights.
        UnsupportedCheckpointError: the weights are pickles, which adx does not open.
    """
    files = named_weight_files(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing == [SINGLE]:
        _refuse_without_safetensors(folder)
    if missing:
        raise CheckpointError(
            f"the shard {missing[0]} is missing from {folder}: {INDEX} lists {len(files)} shards, and {len(missing)} "
            "of them are not there: download them"
        )
    return files


def stored_tensors(folder: Path, files: tuple[str, ...]) -> tuple[StoredTensor, ...]:
    """Every tensor of the weight files, after each file's size and the index were checked.

    Raises:
        CheckpointError: a file is damaged, or the index names a tensor that its shard does not hold.
    """
    tensors = tuple(tensor for file in files for tensor in read_safetensors(folder / file))
    if files == (SINGLE,):
        return tensors
    held = {(tensor.file, tensor.name) for tensor in tensors}
    for name, file in _weight_map(folder).items():
        if (file, name) not in held:
            raise CheckpointError(
                f"{INDEX} says that the tensor {name} is in {file}, but that file does not hold it: download both again"
            )
    return tensors


def _stored(name: str, file: str, entry: Mapping[str, Any]) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    nbytes = math.prod(shape) * _BITS[entry["dtype"]] // 8
    if start < 0 or end - start != nbytes or any(size < 0 for size in shape):
        raise ValueError(f"{name}: {end - start} bytes for shape {list(shape)} of {entry['dtype']}")
    return StoredTensor(name, file, str(entry["dtype"]), shape, nbytes)


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{INDEX} in {folder} has no weight_map: download it again")
    for file in index.values():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{INDEX} in {folder} names the shard {file!r}, which is no safetensors file beside it"
            )
    return index


def _refuse_without_safetensors(folder: Path) -> None:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedCheckpointError(
            f"{folder} holds its weights as pickles ({pickles[0]}), which can run code when opened, so adx does "
            "not open them: convert them to safetensors where you trust them (transformers' save_pretrained writes "
            f"{SINGLE}), or take a revision of the model that has safetensors"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"; it holds {', '.join(others[:3])}, which is not transformers' layout" if others else ""
    raise CheckpointError(f"{folder} holds no weights: {SINGLE} or {INDEX} with its shards is needed{found}")
