"""Second moments of what goes into linear layers, which GPTQ takes for the Hessian of the layer's squared error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.calibration.statistics import Arrays, fingerprint, refuse_non_finite
from adx.export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]


class HessianObserver:
    """Sum over tokens of x^T x of each layer's input x, in float64 (Frantar et al. 2022, "GPTQ", equation 1, without
    its factor 2).

    Layers that read the very same tensor (query, key and value; gate and up) share one matrix, kept under the name of
    the first of them. Memory: 8 bytes times the square of the input's width for each matrix.
    """

    def __init__(self, names: Collection[str], divisors: Mapping[str, Floats] | None = None) -> None:
        """Args:
        names: layers to observe.
        divisors: what a layer's input is divided by, (in,); absent where it is not.
        """
        self._names = frozenset(names)
        given = divisors or {}
        self._inverse = {
            name: np.float32(1) / np.asarray(given[name], np.float32) for name in sorted(self._names) if name in given
        }
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._first: dict[str, str] = {}  # layer -> whose matrix is its own
        self._last: tuple[str, torch.Tensor, int] | None = None  # layer, its input, the input's version

    @property
    def kind(self) -> str:
        """As in `Observer`."""
        names = fingerprint(dict.fromkeys(self._names, 0))
        return f"hessians of {names} of inputs times {fingerprint(self._inverse)}"

    def observe(self, name: str, x: torch.Tensor, _y: torch.Tensor) -> None:
        """As in `Observer`.

        Raises:
            CheckpointError: NaN or infinity; or a layer shared its input with another before, and no longer does.
        """
        import torch

        if name not in self._names:
            return
        first = self._same_input(name, x)
        if self._first.setdefault(name, first) != first:
            if self._first[name] != name:
                raise CheckpointError(
                    f"layers {name} and {self._first[name]} read the same input at first and then different ones: "
                    "quantize this model by rounding"
                )
            first = name
        if first != name:
            return
        self._last = (name, x, x._version)  # kept alive, so that no other tensor gets its memory
        flat = x.flatten(0, -2).float()
        if name in self._inverse:
            flat = flat * torch.from_numpy(self._inverse[name])
        product = flat.T @ flat
        refuse_non_finite(name, float(product.diagonal().sum()))
        if name not in self._sums:
            self._sums[name] = torch.zeros(product.shape, dtype=torch.float64)
        self._sums[name] += product
        self._tokens[name] = self._tokens.get(name, 0) + len(flat)

    def row_done(self) -> None:
        """As in `Observer`."""
        self._last = None

    def hessians(self) -> dict[str, Floats]:
        """Mean over tokens of x^T x, (in, in), by layer; layers that share an input share the array."""
        own = {name: (total / self._tokens[name]).float().numpy() for name, total in self._sums.items()}
        return {name: own[first] for name, first in self._first.items()}

    def tokens(self) -> dict[str, int]:
        """Tokens that each layer saw."""
        return {name: self._tokens[first] for name, first in self._first.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        """As in `Observer`."""
        names = list(self._sums)
        found: dict[str, NDArray[Any]] = {
            "layers": np.array(list(self._first), np.str_),
            "firsts": np.array(list(self._first.values()), np.str_),
            "names": np.array(names, np.str_),
            "tokens": np.array([self._tokens[name] for name in names], np.int64),
        }
        return found | {f"sums/{name}": self._sums[name].numpy() for name in names}

    def restore(self, state: Arrays) -> None:
        """As in `Observer`."""
        import torch

        names = [str(name) for name in state["names"]]
        tokens = dict(zip(names, state["tokens"].tolist(), strict=True))
        pairs = zip(map(str, state["layers"]), map(str, state["firsts"]), strict=True)
        sums = {name: torch.from_numpy(state[f"sums/{name}"]) for name in names}
        self._first, self._tokens, self._sums = dict(pairs), tokens, sums

    def _same_input(self, name: str, x: torch.Tensor) -> str:
        """The first layer that read this very tensor, unchanged, in the same division; else the layer itself."""
        if self._last is None:
            return name
        first, last, version = self._last
        same = (
            x.data_ptr() == last.data_ptr()
            and (x.shape, x.stride(), x.dtype) == (last.shape, last.stride(), last.dtype)
            and x._version == version
        )
        own, other = self._inverse.get(name), self._inverse.get(first)
        divided = own is other if own is None or other is None else np.array_equal(own, other)
        return first if same and divided else name
