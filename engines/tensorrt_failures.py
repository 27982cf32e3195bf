"""Why TensorRT refused a graph, in words that name the node, its layer in the model and what to do."""

from __future__ import annotations

import re
from typing import Any

from adx.engines.tensorrt_library import TensorRTLibrary, local_capability
from adx.engines.tensorrt_log import BuildLog, without_noise
from adx.export.errors import AdxError, BackendError, LoweringError, UsageError

WORDS = 500  # most characters quoted of one message

HEAD_SIZES = range(16, 257, 8)  # tried one by one with TensorRT for RTX 1.7: these build, 8 and 512 do not
MIN_HEADS = 4  # with fewer query heads there is none for a profile with exactly one new token a row (tried likewise)
HALVES = ("HALF", "BF16")  # element types of attention with a kernel of its own

# What the parser or the builder says, and what can be done about it.
_REMEDIES = (
    (r"profile", "its shapes do not fit the graph: leave out --min-shapes, --opt-shapes and --max-shapes"),
    (r"static sequence length", "the cache's length must be a number: give the dimension a fixed size"),
    (
        r"weights|initializer",
        "its weights file is missing or damaged: check the bundle with adx verify, or export again",
    ),
    (
        r"UNSUPPORTED|Plugin not found|No importer",
        "the library does not have this operator in this form: use a newer release of it, or another target",
    ),
    (
        r"libnvinfer_lean",
        "a version-compatible plan holds the lean runtime: pip install tensorrt-lean, or leave it out",
    ),
    (r"workspace", "pass a larger --workspace, or leave it out for all the memory that the GPU has"),
    (r"out of memory|could not be allocated", "free memory on the GPU, or pass smaller limits (--max-batch-size)"),
)
_ANYTHING = "its build log says more; try another --opt-level or a newer release of the library"


def parser_failure(library: TensorRTLibrary, parser: Any, graph: str, log: BuildLog) -> LoweringError:
    """What `parser`, which has just refused `graph`, says of the first nodes that it refused."""
    said = [_parser_error(parser.get_error(index)) for index in range(min(parser.num_errors, 3))]
    if parser.num_errors == 0 or not parser.get_error(0).node_name():
        said += log.causes()[:1]  # what is wrong with a weights file is in the log only
    words = "; ".join(said) or "it gives no reason"
    return LoweringError(f"{library.name} cannot take {graph}: {words}: {_remedy(words)} (all of it: {log.path})")


def builder_failure(
    library: TensorRTLibrary, network: Any, plan: str, log: BuildLog, *, refit: bool, workspace: int | None
) -> AdxError:
    """What the builder, which has just made no plan of `network`, says of it.

    Args:
        refit: whether the plan was to take new weights later.
        workspace: bytes that the build was held to, or None.
    """
    causes = log.causes()
    words = "; ".join(text[:WORDS] for text in causes[-2:]) or "it gives no reason"
    head = f"{library.name} cannot build {plan}: "
    if "Attention operation was not supported" in words:
        return LoweringError(f"{head}{_attention(network)} (all of it: {log.path})")
    if refit and local_capability() is None:
        return BackendError(
            f"{head}a plan that takes its weights later is built only on a machine with a GPU, and there is no usable "
            f"CUDA device here ({words}): leave out refit and strip, or run the same command on a machine with a GPU"
        )
    if not causes and log.lacks_device():
        return BackendError(f"{head}it needs a CUDA device, and there is no usable one here; all of it: {log.path}")
    named = _named(network, words)
    where = f" at {', '.join(named)}" if named else ""
    if workspace is not None and "workspace" in words:
        return UsageError(f"{head}{workspace} bytes of workspace are too few{where} ({words}): {_remedy(words)}")
    return LoweringError(f"{head}{words}{where}: {_remedy(words)} (all of it: {log.path})")


def _parser_error(error: Any) -> str:
    """One parser error: node, operator, kind and words."""
    words = without_noise(error.desc())[:WORDS]
    kind = error.code().name
    if not error.node_name():
        return f"{kind}: {words}"
    return f"the node {error.node_name()} ({error.node_operator()}): {kind}: {words}"


def _remedy(words: str) -> str:
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, words, re.IGNORECASE)), _ANYTHING)


def _named(network: Any, words: str) -> list[str]:
    """Layers of the network that an error names, as the graph's nodes are named; at most three."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    names = {layer.name for layer in layers if layer.type.name != "CONSTANT"}
    found = [name for name in names if re.search(rf"(?<!\w)(?<!\w\.){re.escape(name)}(?!\w|\.\w)", words)]
    return sorted(found)[:3]


def _attention(network: Any) -> str:
    """Which attention layers have no kernel, by their heads and element type; the builder tells neither."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    queries = {
        layer.name.removesuffix("_AttentionInput"): (*layer.get_input(0).shape[1::2], layer.get_input(0).dtype.name)
        for layer in layers
        if layer.type.name == "ATTENTION_INPUT"
    }  # name to heads, head size, element type
    odd = {name for name, (_, size, dtype) in queries.items() if size not in HEAD_SIZES or dtype not in HALVES}
    odd = odd or {name for name, (heads, _, _) in queries.items() if heads < MIN_HEADS} or set(queries)
    first, *others = [name for name in queries if name in odd]
    heads, size, dtype = queries[first]
    more = f" and {len(others)} more like it" if others else ""
    return (
        f"no kernel for {first}{more}: attention with {heads} query heads of size {size} in {dtype}; there are kernels "
        f"for head sizes that are multiples of 8 from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}, in {' or '.join(HALVES)}, "
        f"and for one new token a row with {MIN_HEADS} query heads or more: use another target, as ort-cpu, or a model "
        "with such heads"
    )
