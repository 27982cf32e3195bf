"""Tiny models as prefill and decode graphs over a preallocated cache, and sessions over them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from traced import Traced

from adx.calibration.recipe import make_channel_recipe
from adx.engines.compiled import CompiledEngine
from adx.engines.static_graphs import write_graphs
from adx.export.spec import Phase
from adx.runtime.ort_graphs import OrtGraphs
from adx.runtime.static_session import StaticSession


@functools.cache
def written(source: Traced) -> CompiledEngine:
    """The graphs of a traced model in its scratch folder, linear layers in float16."""
    return write_graphs(source.semantic, lambda layers: make_channel_recipe("fp16", layers), source.scratch, ranges={})


def paths(source: Traced) -> dict[Phase, Path]:
    """The file of each phase."""
    return {graph.phase: source.scratch / graph.file for graph in written(source).graphs}


def executor(source: Traced) -> OrtGraphs:
    files = paths(source)
    return OrtGraphs(files["prefill"], files["decode"], source.spec.kv_cache, source.vocab_size, threads=1)


def session(source: Traced, **settings: Any) -> StaticSession:
    return StaticSession(executor(source), source.spec.kv_cache, source.vocab_size, **settings)
