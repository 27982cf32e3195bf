"""One trace of a checkpoint into a semantic ONNX graph: attention, rotary tables, norms, linear layers as single nodes.

The leaves that every family has (linear layers, RMS norms, rotary tables) are swapped for stand-ins while the trace
runs; each emits one node that keeps the layer's name and refers to the checkpoint's own tensor, so nothing is copied,
transposed or folded. Attention goes through transformers' `AttentionInterface`. All else is traced as it is.

Nodes of the domain `adx`:
- `Linear(x, weight, bias?)`, attributes `name`, `transposed` (weight is (in, out) and not (out, in))
- `RotaryTable(position_ids) -> cos, sin`, attribute `name`; the values are in `SemanticGraph.rotary`
- `CausalAttention(q, k, v, past_k, past_v) -> out, present_k, present_v` on (B, H, T, D), attributes `layer`, `scale`,
  `window` (0: none; the current token counts), `softcap` (0: none)
- `LogitsRows(hidden)`: the identity; a target puts its choice of rows there
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.errors import UnsupportedCheckpointError
from adx.export.spec import (
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    KVCacheSpec,
    past_name,
    present_name,
)

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

DOMAIN = "adx"
ATTENTION = "adx"  # the name under which the attention function is registered with transformers
OPSET = 23  # the first with RMSNormalization, RotaryEmbedding and Attention


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a rotary embedding, as the model's own module computes them.

    Attributes:
        cos: (positions, rotary_dim / 2) float32.
        sin: as `cos`.
        long_from: position in the table where the values for rows of `KVCacheSpec.recompute_at` tokens or more begin
            (long rope), or None where one set of values serves all lengths.
    """

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    long_from: int | None = None


@dataclass(frozen=True)
class SemanticGraph:
    """The traced model: every target is lowered from a copy of it.

    Attributes:
        model: an onnx_ir model whose initializers refer to the checkpoint's tensors.
        rotary: tables by the name that `RotaryTable` nodes carry.
        kv_cache: shape of the cache whose past and present are the graph's inputs and outputs.
        vocab_size: width of the logits.
    """

    model: ir.Model
    rotary: dict[str, RotaryTable]
    kv_cache: KVCacheSpec
    vocab_size: int


def trace(model: Any, kv_cache: KVCacheSpec) -> SemanticGraph:
    """Trace a transformers causal language model.

    Args:
        model: a `PreTrainedModel` in float32 and eval mode. It is left as it was.
        kv_cache: shape of its cache.

    Raises:
        UnsupportedCheckpointError: the model cannot be traced, or attends in a way that adx does not know.
    """
    import torch

    rotary: dict[str, RotaryTable] = {}
    previous = model.config._attn_implementation
    with torch.no_grad(), _semantic_leaves(model, kv_cache, rotary), _quiet():
        module = _traced_module(model, kv_cache)
        model.set_attn_implementation(ATTENTION)
        try:
            program = _export(module, kv_cache)
        except UnsupportedCheckpointError:
            raise
        except Exception as error:
            raise UnsupportedCheckpointError(
                f"{type(model).__name__} could not be traced: {str(error).splitlines()[0] if str(error) else error!r}; "
                "run again with --debug for the whole trace"
            ) from error
        finally:
            model.set_attn_implementation(previous)
    graph = program.model
    graph.graph.name = type(model).__name__
    _name_inputs_and_outputs(graph, kv_cache)
    return SemanticGraph(graph, rotary, kv_cache, int(model.config.get_text_config().vocab_size))


class _PastAndPresent:
    """Where the attention function finds this trace's past, and leaves its present."""

    def __init__(self, kv_cache: KVCacheSpec) -> None:
        self.kv_cache = kv_cache
        self.past: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _traced_module(model: Any, kv_cache: KVCacheSpec) -> torch.nn.Module:
    """The module that is traced, `(input_ids, position_ids, past) -> (logits, present)`; registers its attention."""
    import torch
    from transformers import AttentionInterface

    state = _PastAndPresent(kv_cache)
    AttentionInterface.register(ATTENTION, _attention(state))

    class Traced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, position_ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
        ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
            state.past, state.present = past, {}
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            return logits, [state.present[i] for i in range(kv_cache.layers)]

    return Traced()


def _attention(state: _PastAndPresent) -> Any:
    """The function registered with transformers: one `CausalAttention` node a layer."""
    import torch

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,  # (B, H, T, D)
        key: torch.Tensor,  # (B, Hkv, T, D)
        value: torch.Tensor,  # (B, Hkv, T, D)
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        unknown = sorted(k for k in ("s_aux", "head_mask", "position_bias") if others.get(k) is not None)
        if unknown:
            raise UnsupportedCheckpointError(
                f"{type(module).__name__} attends with {', '.join(unknown)}, unknown to adx"
            )
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int on every transformers attention module
        past_key, past_value = state.past[layer]
        batch, _, length, dim = query.shape
        kv_heads = key.shape[1]
        total = past_key.shape[2] + length
        window = sliding_window if sliding_window is not None else state.kv_cache.windows[layer]
        attributes: dict[str, Any] = {
            "layer": layer,
            "scale": float(dim**-0.5 if scaling is None else scaling),
            "window": int(window or 0),
            "softcap": float(softcap or 0.0),
        }
        present_shape = (batch, kv_heads, total, dim)
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::CausalAttention",
            (query, key, value, past_key, past_value),
            attributes,
            dtypes=(query.dtype,) * 3,
            shapes=(query.shape, present_shape, present_shape),
            version=1,
        )
        state.present[layer] = (present_key, present_value)
        return out.transpose(1, 2), None

    return attention


@contextmanager
def _semantic_leaves(model: Any, kv_cache: KVCacheSpec, rotary: dict[str, RotaryTable]) -> Iterator[None]:
    """Swap the leaves that adx knows for their stand-ins; put them back at the end."""
    swapped: list[tuple[Any, str, Any]] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(_logits_rows)
    try:
        for name, module in list(model.named_modules()):
            stand_in = _stand_in(name, module, kv_cache, rotary)
            if stand_in is not None:
                parent_name, _, attribute = name.rpartition(".")
                parent = model.get_submodule(parent_name)
                swapped.append((parent, attribute, module))
                if module is model.get_output_embeddings():
                    stand_in.register_forward_pre_hook(_logits_rows)
                setattr(parent, attribute, stand_in)
        yield
    finally:
        for parent, attribute, module in reversed(swapped):
            setattr(parent, attribute, module)
        hook.remove()


def _logits_rows(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    import torch

    (hidden,) = args
    return (
        torch.onnx.ops.symbolic(f"{DOMAIN}::LogitsRows", (hidden,), dtype=hidden.dtype, shape=hidden.shape, version=1),
    )


def _stand_in(name: str, module: Any, kv_cache: KVCacheSpec, rotary: dict[str, RotaryTable]) -> Any:
    """The stand-in for one module, or None where it is traced as it is."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kind = type(module).__name__
    if type(module) is torch.nn.Linear:
        return _linear(name, module, transposed=False)
    if type(module) is Conv1D:
        return _linear(name, module, transposed=True)
    if kind.endswith("RMSNorm"):
        return _rms_norm(module)
    if kind.endswith("RotaryEmbedding") and hasattr(module, "inv_freq"):
        table = _rotary_table(module, kv_cache)
        if table is not None:
            rotary[name] = table
            return _rotary(name, 2 * table.cos.shape[1])
    return None


def _linear(name: str, module: Any, *, transposed: bool) -> Any:
    import torch

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = module.weight, module.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            width = self.weight.shape[1 if transposed else 0]
            return torch.onnx.ops.symbolic(
                f"{DOMAIN}::Linear",
                (x, self.weight) if self.bias is None else (x, self.weight, self.bias),
                {"name": name, "transposed": int(transposed)},
                dtype=x.dtype,
                shape=(*x.shape[:-1], width),
                version=1,
            )

    return Linear()


def _rms_norm(module: Any) -> Any:
    """A stand-in for an RMS norm, if the module computes one (its weight may be an offset from 1)."""
    import torch

    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.ndim != 1 or epsilon is None:
        return None
    small = float(epsilon)
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0))
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    expected = module(x)
    for scale in (weight.detach(), 1.0 + weight.detach()):
        if torch.allclose(normed * scale, expected, rtol=1e-5, atol=1e-6):
            break
    else:
        return None

    class RMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(scale, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.onnx.ops.symbolic(
                "::RMSNormalization",
                (x, self.weight),
                {"axis": -1, "epsilon": small},
                dtype=x.dtype,
                shape=x.shape,
                version=OPSET,
            )

    return RMSNorm()


def _rotary(name: str, dim: int) -> Any:
    import torch

    class Rotary(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            shape = (*position_ids.shape, dim)
            return tuple(
                torch.onnx.ops.symbolic_multi_out(
                    f"{DOMAIN}::RotaryTable",
                    (position_ids,),
                    {"name": name},
                    dtypes=(x.dtype,) * 2,
                    shapes=(shape,) * 2,
                    version=1,
                )
            )

    return Rotary()


def _rotary_table(module: Any, kv_cache: KVCacheSpec) -> RotaryTable | None:
    """Ask the model's module for its values at every position; None where they are not (cos, cos), (sin, sin)."""
    import torch

    def values(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        cos, sin = module(torch.zeros(1, 1, 1), torch.arange(count)[None])
        return cos[0].numpy(), sin[0].numpy()

    if kv_cache.recompute_at is None:
        cos, sin = values(kv_cache.capacity)
        long_from = None
    else:
        long_from = kv_cache.recompute_at - 1
        short, long = values(long_from), values(kv_cache.capacity)
        cos, sin = (np.concatenate(pair) for pair in zip(short, long, strict=True))
    half = cos.shape[1] // 2
    if not (np.array_equal(cos[:, :half], cos[:, half:]) and np.array_equal(sin[:, :half], sin[:, half:])):
        return None
    return RotaryTable(np.ascontiguousarray(cos[:, :half]), np.ascontiguousarray(sin[:, :half]), long_from)


def _export(module: torch.nn.Module, kv_cache: KVCacheSpec) -> torch.onnx.ONNXProgram:
    import torch

    # Sizes apart from each other and from 0 and 1, which the exporter would take for constants.
    batch, length, past = 2, 3, 5
    shape = (batch, kv_cache.kv_heads, past, kv_cache.head_dim)
    pasts = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(kv_cache.layers)]
    tokens = torch.ones(batch, length, dtype=torch.int64)
    positions = torch.arange(past, past + length)[None].repeat(batch, 1)
    dim = torch.export.Dim
    batch_dim, length_dim, past_dim = dim("batch_size"), dim("sequence_length"), dim("past_sequence_length")
    ids = {0: batch_dim, 1: length_dim}
    cache = {0: batch_dim, 2: past_dim}
    program = torch.export.export(
        module,
        (tokens, positions, pasts),
        dynamic_shapes=(ids, ids, [(cache, cache)] * kv_cache.layers),
        strict=False,
    )
    exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, optimize=True, verify=False, verbose=False)
    if exported is None:
        raise UnsupportedCheckpointError("the trace gave no graph")
    return exported


def _name_inputs_and_outputs(model: ir.Model, kv_cache: KVCacheSpec) -> None:
    parts = [(layer, part) for layer in range(kv_cache.layers) for part in ("key", "value")]
    inputs = [INPUT_IDS, POSITION_IDS, *(past_name(layer, part) for layer, part in parts)]  # type: ignore[arg-type]
    outputs = [LOGITS, *(present_name(layer, part) for layer, part in parts)]  # type: ignore[arg-type]
    for values, names in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's own remarks, which say nothing to a user, stay out of the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
