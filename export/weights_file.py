"""A weights file: tensors one after another, each written once, referred to by ONNX as external data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

ALIGNMENT = 64  # bytes: a cache line, and what vector loads want


class WeightsFile:
    """Writes tensors into a new file; equal tensors share one place, so a tied weight is stored once.

    A context manager. Only one tensor is in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._places: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def __enter__(self) -> WeightsFile:
        self._file = self.path.open("xb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, name: str, array: np.ndarray) -> ir.ExternalTensor:
        """Write an array of any shape; the tensor returned refers to it by file name, offset and length."""
        import onnx_ir as ir

        assert self._file is not None, "used outside of its context"
        array = np.ascontiguousarray(array)
        data = array.reshape(-1).view(np.uint8).data
        # The bytes alone decide: two views of one table (an embedding and its head) may differ in shape.
        key = (array.dtype.str, (array.size,), hashlib.sha256(data).digest())
        if key not in self._places:
            end = self._file.tell()
            self._file.write(bytes(-end % ALIGNMENT))
            self._places[key] = self._file.tell()
            self._file.write(data)
        return ir.ExternalTensor(
            self.path.name,
            self._places[key],
            array.nbytes,
            ir.DataType.from_numpy(array.dtype),
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=str(self.path.parent),
        )
