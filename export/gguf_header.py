"""A GGUF file's header: scalar metadata and the list of tensors, checked against the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.util
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adx.export.checkpoint_files import StoredTensor, refuse_pointer
from adx.export.errors import BackendError, CheckpointError, UnsupportedCheckpointError
from adx.export.families import GGUF_FAMILIES

Scalar = bool | int | float | str

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_COUNT_LIMIT = 1 << 24  # keys, tensors, elements of an array: more than any model has
_STRING_LIMIT = 1 << 24
_DIMENSION_LIMIT = 8


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself: scalar metadata (lists are left out) and its tensors."""

    metadata: dict[str, Scalar]
    tensors: tuple[StoredTensor, ...]

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Scalar | None:
        """A value under the architecture's own prefix, as `context_length`."""
        return self.metadata.get(f"{self.architecture}.{key}")


def require_gguf() -> None:
    """Check that the packages that read GGUF weights are there.

    Raises:
        BackendError: `gguf` or `accelerate`, which transformers needs for it, is missing.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise BackendError(
                f"reading a .gguf file needs the package {package}, which is not installed: run "
                "pip install 'adx-toolchain[gguf]'"
            )


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check a GGUF file's header; no weight is read.

    Raises:
        CheckpointError: it is no GGUF file, a git-lfs pointer, of another version, damaged or truncated.
    """
    refuse_pointer(path)
    with path.open("rb") as stream:
        try:
            metadata, infos, alignment, position = _read(stream, path.name)
        except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path.name} has a damaged GGUF header ({error}): download it again") from error
    start = -(-position // alignment) * alignment
    end = max((start + offset + tensor.nbytes for tensor, offset in infos), default=start)
    size = path.stat().st_size
    if size < end:
        raise CheckpointError(
            f"{path.name} is truncated: it has {size} bytes, and its header says {end}: download it again"
        )
    return GGUFHeader(metadata, tuple(tensor for tensor, _ in infos))


def refuse_gguf(header: GGUFHeader, name: str) -> None:
    """Refuse what transformers could not load, or would load as a different model.

    Raises:
        UnsupportedCheckpointError: with what would help.
    """
    family = GGUF_FAMILIES.get(header.architecture)
    if family is None:
        raise UnsupportedCheckpointError(
            f"{name} has the GGUF architecture {header.architecture!r}, which adx cannot export; GGUF files of these "
            f"can be: {', '.join(sorted(GGUF_FAMILIES))}"
        )
    advice = "use the model's safetensors checkpoint"
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedCheckpointError(f"{name} is a GGUF {kind}, not a whole model: {advice}")
    if int(header.metadata.get("split.count", 0)) > 1:
        raise UnsupportedCheckpointError(f"{name} is one part of a split GGUF: join them with llama-gguf-split --merge")
    for key, value, reason in family.gguf_refused:
        if header.get(key) == value:
            raise UnsupportedCheckpointError(f"{name}: {reason}: {advice}")
    if int(header.get("expert_count") or 0) > 0:
        raise UnsupportedCheckpointError(f"{name} is a mixture of experts, which adx cannot export")
    scaling = header.get("rope.scaling.type")
    factors = [tensor.name for tensor in header.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if factors or scaling not in (None, "none"):
        raise UnsupportedCheckpointError(
            f"{name} scales its rotary positions ({scaling or factors[0]}), which transformers does not read from GGUF "
            f"and would compute wrongly: {advice}"
        )
    rotary, head_dim = header.get("rope.dimension_count"), _head_dim(header)
    if rotary is not None and rotary != head_dim:
        raise UnsupportedCheckpointError(
            f"{name} rotates {rotary} of {head_dim} elements of a head, which transformers does not read from GGUF and "
            f"would compute wrongly: {advice}"
        )


def _head_dim(header: GGUFHeader) -> int | None:
    explicit, width, heads = (
        header.get(key) for key in ("attention.key_length", "embedding_length", "attention.head_count")
    )
    if explicit is not None:
        return int(explicit)
    return int(width) // int(heads) if width and heads else None


def _read(stream: BinaryIO, name: str) -> tuple[dict[str, Scalar], list[tuple[StoredTensor, int]], int, int]:
    if stream.read(4) != _MAGIC:
        raise CheckpointError(f"{name} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
    version = _number(stream, "<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{name} has GGUF version {version}, and versions {_VERSIONS[0]} and {_VERSIONS[1]} (little-endian) can be "
            "read: convert the model again with a current llama.cpp"
        )
    tensor_count, key_count = _count(stream, "tensors"), _count(stream, "keys")
    metadata: dict[str, Scalar] = {}
    for _ in range(key_count):
        key = _string(stream)
        value = _value(stream, int(_number(stream, "<I")))
        if value is not None:
            metadata[key] = value
    infos = [_tensor(stream, name) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment <= 0:
        raise ValueError(f"alignment {alignment}")
    return metadata, infos, alignment, stream.tell()


def _tensor(stream: BinaryIO, file: str) -> tuple[StoredTensor, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = _string(stream)
    dimensions = int(_number(stream, "<I"))
    if dimensions > _DIMENSION_LIMIT:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = tuple(reversed([int(_number(stream, "<Q")) for _ in range(dimensions)]))
    kind = GGMLQuantizationType(int(_number(stream, "<I")))
    offset = int(_number(stream, "<Q"))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return StoredTensor(name, file, kind.name, shape, math.prod(shape) // block * block_bytes), offset


def _number(stream: BinaryIO, form: str) -> Scalar:
    value: Scalar = struct.unpack(form, stream.read(struct.calcsize(form)))[0]
    return value


def _count(stream: BinaryIO, what: str) -> int:
    count = int(_number(stream, "<Q"))
    if count > _COUNT_LIMIT:
        raise ValueError(f"{count} {what}")
    return count


def _string(stream: BinaryIO) -> str:
    length = int(_number(stream, "<Q"))
    if length > _STRING_LIMIT:
        raise ValueError(f"a string of {length} bytes")
    raw = stream.read(length)
    if len(raw) < length:
        raise ValueError("the file ends inside it")
    return raw.decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Scalar | None:
    """One metadata value; a list is read over and gives None."""
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _number(stream, _FORMATS[kind])
    element, count = int(_number(stream, "<I")), _count(stream, "elements")
    if element in _FORMATS:
        width = struct.calcsize(_FORMATS[element]) * count
        if len(stream.read(width)) < width:
            raise ValueError("the file ends inside it")
        return None
    if element != _STRING:
        raise ValueError(f"a list of type {element}")
    for _ in range(count):
        length = int(_number(stream, "<Q"))
        if len(stream.read(length)) < length:
            raise ValueError("the file ends inside it")
    return None
