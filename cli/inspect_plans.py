"""What `adx inspect` shows of TensorRT plans, out of the records beside them: no TensorRT is needed to look."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.cli.figures import size
from adx.export.errors import BundleError
from adx.export.spec import INPUT_IDS, past_name

if TYPE_CHECKING:
    from adx.engines.plan_record import PlanRecord
    from adx.engines.profiles import Shape, ShapeProfile
    from adx.export.bundle import Bundle
    from adx.export.manifest import EngineRecord

SHOWN_TYPES = 8  # layer types on a line, most frequent first


def plan_records(bundle: Bundle) -> dict[str, PlanRecord]:
    """The record of every plan in the bundle, by the plan's path in it.

    Raises:
        BundleError: a record is missing, damaged, or was changed.
    """
    from adx.engines.plan_record import from_json, record_path

    records = {}
    for engine in bundle.manifest.engines:
        if engine.compute_capability is None:
            continue
        for plan in dict.fromkeys((engine.prefill, engine.decode)):
            name = record_path(Path(plan)).as_posix()
            try:
                text = bundle.file(name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BundleError(f"{name} cannot be read ({error}): {_rebuild(bundle, engine)}") from error
            records[plan] = from_json(text, name)
    return records


def plan_facts(records: Mapping[str, PlanRecord]) -> list[dict[str, Any]]:
    """The records for JSON, each with its plan's path; profiles as sizes of their named dimensions."""
    from adx.engines.plan_record import to_json

    facts = []
    for plan, record in records.items():
        keys = json.loads(to_json(record))
        keys["profiles"] = [{"name": profile.name, **profile_sizes(profile)} for profile in record.profiles]
        facts.append({"plan": plan, **keys})
    return facts


def plan_lines(records: Mapping[str, PlanRecord]) -> list[str]:
    """The plans for people."""
    return [line for plan, record in records.items() for line in _lines(plan, record)]


def profile_sizes(profile: ShapeProfile) -> dict[str, list[int]]:
    """(min, opt, max) of what ties the inputs' shapes: rows, new tokens of a row, and places in its cache."""
    ids, cache = profile.shapes[INPUT_IDS], profile.shapes.get(past_name(0, "key"))
    sizes = {"batch": _axis(ids, 0), "new_tokens": _axis(ids, 1)}
    return sizes if cache is None else {**sizes, "cache": _axis(cache, 2)}


def _axis(shapes: tuple[Shape, Shape, Shape], axis: int) -> list[int]:
    return [shape[axis] for shape in shapes]


def _lines(plan: str, record: PlanRecord) -> list[str]:
    facts, cuda = record.facts, f", CUDA {record.cuda}" if record.cuda else ""
    return [
        f"plan        {plan}: {record.library} {record.library_version}{cuda}, {record.compute_capability}, "
        f"{record.phase}, {size(record.plan_bytes)}, built in {facts.seconds:g} s",
        f"            layers {sum(facts.layers.values()):,}: {_counts(facts.layers)}",
        f"            computed in {_counts(facts.precisions)}",
        f"            KV cache updates {facts.kv_cache_updates}, attention layers {facts.attentions} whole and "
        f"{facts.attentions_decomposed} decomposed, plugins {facts.plugins}",
        f"            memory: weights {_bytes(facts.weights_bytes)}, activations {_bytes(facts.activation_bytes)}, "
        f"scratch {_bytes(facts.scratch_bytes)}",
        *(f"            profile {profile.name}: {_profile(profile)}" for profile in record.profiles),
        f"            options: {_options(record)}",
        *(f"            the builder warned: {warning}" for warning in facts.warnings),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{count} {name}" for name, count in list(counts.items())[:SHOWN_TYPES]]
    rest = sum(list(counts.values())[SHOWN_TYPES:])
    return ", ".join(shown) + (f", {rest} of other types" if rest else "")


def _bytes(count: int | None) -> str:
    return "not said" if count is None else size(count)


def _profile(profile: ShapeProfile) -> str:
    """As `batch 1/4/4, new tokens 1/8/16, cache 2048`, each min/opt/max or the one number."""
    parts = []
    for name, sizes in profile_sizes(profile).items():
        numbers = [sizes[0]] if len(set(sizes)) == 1 else sizes
        parts.append(f"{name.replace('_', ' ')} {'/'.join(map(str, numbers))}")
    return ", ".join(parts)


def _options(record: PlanRecord) -> str:
    options = record.options
    named = {
        f"opt level {options.opt_level}": options.opt_level is not None,
        f"workspace {size(options.workspace_bytes or 0)}": options.workspace_bytes is not None,
        "hardware compatible": record.hardware_compatible,
        "version compatible": record.version_compatible,
        "refit": options.refit,
        "without weights": options.strip,
    }
    return ", ".join(name for name, on in named.items() if on) or "the library's own"


def _rebuild(bundle: Bundle, engine: EngineRecord) -> str:
    return f"adx compile {bundle.path} --target {engine.target} --sm {engine.compute_capability} writes it again"
