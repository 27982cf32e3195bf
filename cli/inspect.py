"""`adx inspect`: what a bundle holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Values
from adx.cli.figures import parity_lines, size
from adx.cli.inspect_layers import ORDERS, layer_lines, layer_rows
from adx.cli.inspect_plans import plan_facts, plan_lines, plan_records
from adx.cli.options import bundle_argument
from adx.cli.output import Output
from adx.export.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from adx.export.bundle import Bundle
    from adx.export.manifest import Manifest


def run(values: Values, output: Output) -> int:
    """Open the bundle and show its manifest."""
    from adx.export.bundle import Bundle
    from adx.export.manifest import to_json

    if values["json"] and values["files"]:
        raise UsageError("--files chooses what people see; --json holds every file anyway")
    if values["sort"] is not None and not values["layers"]:
        raise UsageError("--sort orders the layers that --layers shows: give both")
    bundle = Bundle.open(values["bundle"])
    manifest = bundle.manifest
    plans = plan_records(bundle)
    facts = {"bundle": str(bundle.path), "bytes": bundle.total_bytes(), **json.loads(to_json(manifest))}
    if plans:
        facts["plans"] = plan_facts(plans)
    layers = layer_rows(bundle, values["sort"] or "order") if values["layers"] else []
    if values["layers"]:
        facts["layers"] = layers
    lines = [
        *model_lines(bundle),
        *precision_lines(manifest),
        *engine_lines(manifest),
        *plan_lines(plans),
        *parity_lines(manifest.parity),
        *provenance_lines(manifest),
        *(layer_lines(layers) if values["layers"] else []),
        *([file_table(manifest)] if values["files"] else []),
    ]
    output.result(facts, lines)
    return 0


def model_lines(bundle: Bundle) -> list[str]:
    """The model and its KV cache."""
    manifest, cache = bundle.manifest, bundle.manifest.kv_cache
    model, limits = manifest.model, manifest.limits
    windows = Counter(cache.windows)
    seen = ", ".join(f"{count} x {'all' if window is None else window}" for window, count in windows.items())
    revision = f" at {model.revision}" if model.revision else ""
    return [
        f"bundle      {bundle.path} ({size(bundle.total_bytes())}, schema {manifest.schema_version})",
        f"model       {model.source}{revision}: {model.architecture}, {model.parameters:,} parameters",
        f"            vocabulary {model.vocab_size:,}, hidden {model.hidden_size:,}, {model.heads} heads, "
        f"context {model.context_length:,}, checkpoint in {model.dtype}",
        f"KV cache    {cache.layers} layers of {cache.kv_heads} heads of {cache.head_dim}, {cache.dtype}, layout "
        f"{cache.layout}, {cache.capacity:,} tokens a row",
        f"            {size(cache.bytes_per_token())} a token; tokens that each layer sees: {seen}",
        f"limits      batch {limits.max_batch_size or 'any'}, prompt {limits.max_input_len:,}, "
        f"sequence {limits.max_seq_len:,}",
    ]


def precision_lines(manifest: Manifest) -> list[str]:
    """How many layers have which precision, and which are left out of it and why."""
    record = manifest.quantization
    kinds = Counter((layer.bits, layer.scheme, layer.block_size) for layer in record.layers)
    summary = [f"{count} x {_precision(bits, scheme, block)}" for (bits, scheme, block), count in kinds.items()]
    lines = [f"precision   {record.recipe}: {'; '.join(summary) or 'no layer is quantized'}"]
    lines += [f"            {layer.name}: {layer.reason}" for layer in record.layers if layer.reason]
    return lines + [f"            excluded {node.name}: {node.reason}" for node in record.excluded]


def engine_lines(manifest: Manifest) -> list[str]:
    """Engines, the graphs they consist of, and what each needs."""
    sizes = {record.path: record.size for record in manifest.files}
    lines = []
    for engine in manifest.engines:
        versions = ", ".join(f"{name} {version}" for name, version in engine.built_with.items())
        needs = engine.compute_capability or ", ".join(engine.cpu_features or ()) or "any CPU"
        total = size(sum(sizes[path] for path in engine.files))
        lines.append(f"engine      {engine.target}: {total}, built with {versions}, for {needs}")
        lines += [f"            {path}  {size(sizes[path])}" for path in engine.files]
    phases: dict[str, list[str]] = {}
    for graph in manifest.graphs:
        phases.setdefault(graph.file, []).append(graph.phase)
    for graph in {graph.file: graph for graph in manifest.graphs}.values():
        lines.append(f"graph       {' and '.join(phases[graph.file])}: {graph.file}")
        for label, tensors in (("in ", graph.inputs), ("out", graph.outputs)):
            shown = [f"{tensor.name} {tensor.dtype}{list(tensor.dims)}".replace("'", "") for tensor in tensors]
            rest = f", and {len(shown) - 6} more" if len(shown) > 6 else ""
            lines.append(f"            {label} {', '.join(shown[:6])}{rest}")
    return lines


def provenance_lines(manifest: Manifest) -> list[str]:
    """When, by what and how the bundle was made."""
    record = manifest.provenance
    packages = ", ".join(f"{name} {version}" for name, version in record.packages.items())
    return [
        f"made        {record.created} by adx {manifest.adx_version}",
        f"            {' '.join(record.command)}",
        f"            {packages}",
        f"            source weights sha256 {manifest.model.weights_sha256}",
    ]


def file_table(manifest: Manifest) -> RenderableType:
    """Every file with its size and hash."""
    from rich.table import Table

    table = Table("file", "size", "sha256")
    for record in manifest.files:
        table.add_row(record.path, size(record.size), record.sha256)
    return table


def _precision(bits: int, scheme: str, block_size: int | None) -> str:
    shared = f", groups of {block_size}" if block_size else ""
    return f"{bits} bits {scheme}{shared}"


command = AdxCommand(
    "inspect",
    run,
    help="Show what a bundle holds: model, KV cache, precision, engines, graphs, parity and provenance.",
    arguments=[bundle_argument()],
    sections={
        "Shown": [
            click.Option(
                ["--layers"], is_flag=True, help="Also every layer: shape, precision, error, sensitivity and why."
            ),
            click.Option(
                ["--sort"],
                type=click.Choice(ORDERS),
                help="Order of the layers: the model's (default), or the largest error or sensitivity first.",
            ),
            click.Option(["--files"], is_flag=True, help="Also every file's size and sha256."),
        ],
    },
)
