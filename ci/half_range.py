"""Whether float16 holds what a graph computes: every float16 value is looked at, on text.

ONNX Runtime's CPU provider computes products in float32 and drops the rounding to float16 where a cast to float32
follows, so a graph that overflows on a GPU may be right on the CPU. As outputs of the graph, the values are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.export.spec import (
    INPUT_IDS,
    PAD_LENGTHS,
    ROW_LENGTHS,
    WRITE_INDICES,
    KVCacheSpec,
    past_name,
)

if TYPE_CHECKING:
    import onnx

    from adx.ci.corpus import Corpus

Tokens = NDArray[np.int64]
_ROWS, _LENGTH = 8, 128
_NAMED = 3  # layers that a message names at most


def probe_rows(corpus: Corpus, vocab_size: int, max_input_len: int) -> list[Tokens]:
    """What to look at: text, and as many token ids of the whole vocabulary, for words that no text here holds."""
    length = min(_LENGTH, max_input_len)
    ids = np.random.default_rng(0).permutation(vocab_size)
    count = min(_ROWS, max(1, vocab_size // length))
    return [
        *(corpus.row(start * length, length) for start in range(_ROWS)),
        *(ids[start * length : (start + 1) * length] for start in range(count)),
    ]


def overflows(prefill: Path, kv_cache: KVCacheSpec, rows: Sequence[Tokens], threads: int | None) -> tuple[str, ...]:
    """Run rows of token ids, (T,) each, through the prefill graph and look at every float16 value.

    Args:
        prefill: the graph over a preallocated cache; its weights lie beside it.

    Returns:
        One line that names the layers where a value is infinite or NaN, or nothing.
    """
    import onnx

    model = onnx.load(prefill, load_external_data=False)
    names = _expose(model)
    session = _session(model, prefill, threads)
    inputs = {each.name for each in session.get_inputs()}
    found: dict[str, None] = {}
    for row in rows:
        values = session.run(list(names), _feeds(row, kv_cache, inputs))
        found |= dict.fromkeys(
            layer for layer, value in zip(names.values(), values, strict=True) if not np.isfinite(value).all()
        )
    if not found:
        return ()
    places = ", ".join(list(found)[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
    return (f"float16 overflows at {places}, which a GPU would turn into NaN",)


def _expose(model: onnx.ModelProto) -> dict[str, str]:
    """Make the float16 values outputs of the graph: each one's name, and the layer where it is made."""
    from onnx import TensorProto, helper

    half = TensorProto.FLOAT16
    names: dict[str, str] = {}
    layer = "the embedding"
    for node in model.graph.node:
        layer = node.name if "." in node.name else layer
        casts = node.op_type == "Cast" and next(a.i for a in node.attribute if a.name == "to") == half
        biased = node.op_type == "Add" and node.input[0] in names
        if casts or biased or node.op_type in ("MatMul", "MatMulNBits"):
            names[node.output[0]] = layer
    model.graph.output.extend(helper.make_tensor_value_info(name, half, None) for name in names)
    return names


def _session(model: onnx.ModelProto, path: Path, threads: int | None) -> Any:
    import onnxruntime

    from adx.runtime.threads import usable_threads

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_threads() if threads is None else threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _feeds(row: Tokens, kv_cache: KVCacheSpec, inputs: set[str]) -> dict[str, NDArray[Any]]:
    shape = (1, kv_cache.kv_heads, len(row), kv_cache.head_dim)
    feeds: dict[str, NDArray[Any]] = {
        INPUT_IDS: row[None],
        WRITE_INDICES: np.zeros(1, np.int64),
        ROW_LENGTHS: np.array([len(row)]),
        PAD_LENGTHS: np.zeros(1, np.int64),
    }
    for layer in range(kv_cache.layers):
        feeds[past_name(layer, "key")] = feeds[past_name(layer, "value")] = np.zeros(shape, np.float16)
    return {name: value for name, value in feeds.items() if name in inputs}
