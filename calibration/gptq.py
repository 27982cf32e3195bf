"""GPTQ: columns are rounded one after another, and those still to come make up for the error of each.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1,
with the order of columns by their second moment ("act-order") and scales that are fixed before (so that blocks stay
runs of neighbouring columns, as the kernels want them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from adx.calibration.weights import BlockScheme, Grid, QuantizedWeight, fit_grid, pack
from adx.export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]

COLUMNS = 128  # that are rounded before the others hear of it
DAMPING = 0.01  # of the mean second moment, added to each
_LARGEST_DAMPING = 1.0


@dataclass(frozen=True, eq=False)
class Factor:
    """What GPTQ needs of a layer's inputs; layers with the same input share it.

    Attributes:
        order: (in,) columns, the one with the largest second moment first.
        upper: (in, in) Cholesky factor, upper triangular, of the inverse of the damped second moments in that order.
        moments: (in,) second moment of each column, in the columns' own order.
    """

    order: torch.Tensor
    upper: torch.Tensor
    moments: Floats


def factor(hessian: Floats, *, damping: float = DAMPING) -> Factor:
    """Factor the second moments of a layer's input.

    Args:
        hessian: (in, in) mean over tokens of x^T x.
        damping: part of the mean diagonal that is added to it; ten times as much, up to the mean itself, where the
            matrix is singular with less.

    Raises:
        CheckpointError: the matrix is not finite, or no matrix of second moments.
    """
    import torch

    full = torch.from_numpy(hessian).double()
    moments = full.diagonal().clone()
    if not bool(torch.isfinite(full).all()):
        raise CheckpointError("the second moments of a layer's inputs are not finite: its weights cannot be quantized")
    dead = moments <= 0
    full = full.clone()
    # No input, no error: any rounding will do. Their size must not count in the damping of the others.
    full.diagonal()[dead] = float(moments[~dead].mean()) if not bool(dead.all()) else 1.0
    order = torch.argsort(full.diagonal(), descending=True, stable=True)
    full = full[order][:, order]
    mean = float(full.diagonal().mean())
    while True:
        damped = full + torch.eye(len(full), dtype=full.dtype) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed) or damping >= _LARGEST_DAMPING:
            break
        damping *= 10
    if int(failed):
        raise CheckpointError("the second moments of a layer's inputs are no such matrix: measure them anew")
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return Factor(order, upper.float(), moments.clamp(min=0).float().numpy())


def quantize_gptq(weight: Floats, scheme: BlockScheme, factor: Factor) -> QuantizedWeight:
    """Quantize a matrix (out, in) with the least error in the layer's output.

    Raises:
        UsageError: the weight holds NaN or infinity.
    """
    import torch

    grid = fit_grid(weight, scheme, factor.moments)
    columns, order = weight.shape[1], factor.order.numpy()
    block = np.arange(columns) // scheme.block_size
    scales = torch.from_numpy(np.ascontiguousarray(grid.scales.T[block[order]]))  # (in, out): a column is contiguous
    zeros = torch.from_numpy(np.ascontiguousarray(grid.zeros.T[block[order]])).float()
    left = torch.from_numpy(np.ascontiguousarray(weight.T[order]))
    codes = torch.empty(left.shape, dtype=torch.uint8)
    for start in range(0, columns, COLUMNS):
        end = min(start + COLUMNS, columns)
        part = slice(start, end)
        errors = _round_columns(left[part], scales[part], zeros[part], factor.upper[part, part], codes[part], scheme)
        left[end:] -= factor.upper[part, end:].T @ errors
    own = np.empty((columns, weight.shape[0]), np.uint8)
    own[order] = codes.numpy()
    return _packed(own.T, grid, scheme)


def _round_columns(
    left: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    upper: torch.Tensor,
    codes: torch.Tensor,
    scheme: BlockScheme,
) -> torch.Tensor:
    """Round a few columns, each after those before it were made up for; gives (columns, out) errors to pass on."""
    import torch

    top = float((1 << scheme.bits) - 1)
    usable = scales.abs() > torch.finfo(torch.float32).tiny
    inverse = torch.where(usable, 1.0 / scales, torch.zeros(()))
    errors = torch.empty_like(left)
    for column in range(len(left)):
        values, zero = left[column], zeros[column]
        code = (values * inverse[column]).round_().add_(zero).clamp_(0.0, top)
        codes[column] = code.to(torch.uint8)
        error = values - (code - zero) * scales[column]
        error /= upper[column, column]
        errors[column] = error
        left[column + 1 :].addr_(upper[column, column + 1 :], error, alpha=-1.0)
    return errors


def _packed(codes: NDArray[np.uint8], grid: Grid, scheme: BlockScheme) -> QuantizedWeight:
    rows, columns = codes.shape
    blocks = grid.scales.shape[1]
    filled = np.zeros((rows, blocks * scheme.block_size), np.uint8)
    filled[:, :columns] = codes
    return pack(filled.reshape(rows, blocks, scheme.block_size), grid, scheme, columns)
