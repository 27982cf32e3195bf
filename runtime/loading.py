"""From a bundle on disk to a generator: which engine runs, its tokenizer, the model's own settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adx.export.errors import BackendError, BundleError
from adx.export.spec import GRAPHS
from adx.runtime.generator import Generator
from adx.runtime.session import Session
from adx.runtime.text import TextCodec

if TYPE_CHECKING:
    from adx.export.bundle import Bundle


def load(bundle: str | os.PathLike[str], *, target: str | None = None, threads: int | None = None) -> Generator:
    """Open a bundle, ready to generate.

    Args:
        bundle: the folder that `adx export` wrote.
        target: which of its engines to run; default: its first, and that one only: where its library or GPU is missing,
            nothing else runs in its place. `onnx` runs the graphs of a GPU target on the CPU.
        threads: threads to compute with; default: the CPUs that this process may use.

    Raises:
        BundleError: the bundle is damaged or incomplete.
        BackendError: it has no engine for the target, or the target's library is not installed.
    """
    from adx.export.bundle import Bundle

    opened = Bundle.open(bundle)
    session = _open(opened, _choose_target(opened, target), threads)
    config = _generation_config(opened.path)
    codec = None
    if opened.find("tokenizer.json") is not None:
        codec = TextCodec.open(opened.path, bos=config.get("bos_token_id"))
    return Generator(session, codec, config)


def _open(bundle: Bundle, target: str, threads: int | None) -> Session:
    try:
        return _OPENERS[target](bundle, threads)
    except BackendError as error:
        if target == GRAPHS or all(engine.target != GRAPHS for engine in bundle.manifest.engines):
            raise
        raise BackendError(f"{error}; --target {GRAPHS} runs the same graphs on the CPU, for checks") from error


def _open_ort_cpu(bundle: Bundle, threads: int | None) -> Session:
    from adx.runtime.ort_session import OrtSession

    return OrtSession.open(bundle, threads=threads)


def _static(name: str) -> Callable[[Bundle, int | None], Session]:
    """An opener of `static_openers`, imported when it is used."""

    def opener(bundle: Bundle, threads: int | None) -> Session:
        from adx.runtime import static_openers

        session: Session = getattr(static_openers, name)(bundle, threads)
        return session

    return opener


# What opens a target's engine; a new backend is a line here and a file beside this one. GRAPHS runs them on ONNX
# Runtime's CPU provider, and is never chosen unless it is named.
_OPENERS: Mapping[str, Callable[[Bundle, int | None], Session]] = {
    "ort-cpu": _open_ort_cpu,
    "ort-cuda": _static("open_ort_cuda"),
    "tensorrt": _static("open_tensorrt"),
    "tensorrt-rtx": _static("open_tensorrt_rtx"),
    GRAPHS: _static("open_onnx"),
}


def _choose_target(bundle: Bundle, target: str | None) -> str:
    held = [engine.target for engine in bundle.manifest.engines]
    if target is None:
        runnable = [name for name in held if name in _OPENERS and name != GRAPHS]
        if runnable:
            return runnable[0]
        if GRAPHS in held:
            raise BackendError(
                f"{bundle.path} holds graphs and no plans yet: build them on the host with the GPU (adx compile "
                f"{bundle.path} --target tensorrt, or tensorrt-rtx); --target {GRAPHS} runs the graphs on the CPU, for "
                "checks"
            )
        raise BackendError(f"this adx runs engines for {', '.join(_OPENERS)}; {bundle.path} has {_listed(held)}")
    if target == "ort-cuda" and GRAPHS in held:
        return target  # it runs the graphs as they are
    if target not in held:
        raise BackendError(
            f"{bundle.path} has no engine for {target!r}, it has {_listed(held)}: "
            + (f"adx compile {bundle.path} --target {target}" if GRAPHS in held else f"export with --target {target}")
        )
    if target not in _OPENERS:
        raise BackendError(f"this adx cannot run {target!r} engines, only {', '.join(_OPENERS)}")
    return target


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


# What transformers takes from config.json where there is no generation_config.json.
_FROM_MODEL_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


def _generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or what config.json says of special tokens where the model has none."""
    path = folder / "generation_config.json"
    if path.is_file():
        return _read_object(path)
    path = folder / "config.json"
    config = _read_object(path) if path.is_file() else {}
    return {key: config[key] for key in _FROM_MODEL_CONFIG if config.get(key) is not None}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BundleError(f"{path} holds {type(content).__name__}, not an object")
    return content
