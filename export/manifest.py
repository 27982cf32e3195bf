"""`adx.json`: what a bundle holds, as frozen values, and the rules that a manifest from anywhere must meet."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from adx.export.errors import BundleError
from adx.export.manifest_json import decode, encode, parse_object
from adx.export.spec import CACHE_DTYPES, GraphSpec, KVCacheSpec, ModelSpec

MANIFEST_NAME = "adx.json"
SCHEMA_VERSION = 1
DISTRIBUTION = "adx-toolchain"

_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy")
_SECRET_OPTION = re.compile(r"^--?[a-z0-9_-]*(token|password|secret|api[-_]?key)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf|sk|ghp|glpat)[_-][A-Za-z0-9_-]{8,}")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


@dataclass(frozen=True)
class Limits:
    """Shape limits. `max_batch_size` None: the engine sets no bound."""

    max_batch_size: int | None
    max_input_len: int
    max_seq_len: int


@dataclass(frozen=True)
class LayerQuantization:
    """How one layer's weights are stored.

    Attributes:
        bits: 32 for a layer kept in float32.
        scheme: as `symmetric`, `asymmetric`, `float`.
        block_size: elements that share a scale, or None for one scale per channel or none at all.
        reason: why this layer departs from the recipe, or None.
    """

    name: str
    bits: int
    scheme: str
    block_size: int | None
    reason: str | None


@dataclass(frozen=True)
class ExcludedNode:
    """A node kept from quantization, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuantizationRecord:
    """What was quantized and how; `calibration_sha256` None: no calibration data was used."""

    recipe: str
    calibration_sha256: str | None
    layers: tuple[LayerQuantization, ...]
    excluded: tuple[ExcludedNode, ...] = ()


@dataclass(frozen=True)
class EngineRecord:
    """One target's compiled files.

    Attributes:
        target: as `ort-cpu`.
        files: every file that the runtime loads for it.
        prefill: the file that serves prefill.
        decode: the file that serves decode; the same file where one graph serves both.
        built_with: package to version.
        cpu_features: instruction sets that the files need, or None where any CPU will do.
        compute_capability: as `sm89`, or None where no GPU is meant.
    """

    target: str
    files: tuple[str, ...]
    prefill: str
    decode: str
    built_with: Mapping[str, str]
    cpu_features: tuple[str, ...] | None
    compute_capability: str | None
    limits: Limits


@dataclass(frozen=True)
class Provenance:
    """How the bundle came to be; the command holds no secrets (see `provenance`)."""

    packages: Mapping[str, str]
    command: tuple[str, ...]
    created: str


@dataclass(frozen=True)
class FileRecord:
    """One file of the bundle; the path is relative, with forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The whole of `adx.json`.

    Attributes:
        parity: free JSON with `passed` (true, false, or null where it was skipped, and then `skipped` says why).
        files: every other file of the bundle; `BundleWriter.commit` fills it.
    """

    adx_version: str
    model: ModelSpec
    graphs: tuple[GraphSpec, ...]
    quantization: QuantizationRecord
    engines: tuple[EngineRecord, ...]
    limits: Limits
    parity: Mapping[str, Any]
    provenance: Provenance
    files: tuple[FileRecord, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def kv_cache(self) -> KVCacheSpec:
        """The model's cache, which `adx.json` holds under a key of its own."""
        return self.model.kv_cache

    def engine(self, target: str | None = None) -> EngineRecord:
        """The engine of `target`, or the first one.

        Raises:
            BundleError: there is no such engine here.
        """
        for record in self.engines:
            if target in (None, record.target):
                return record
        there = ", ".join(record.target for record in self.engines) or "none"
        raise BundleError(
            f"this bundle has no engine for {target or 'any target'}; it has {there}: export the model with --target"
        )


def to_json(manifest: Manifest) -> str:
    """`adx.json`'s text: keys in the order of the contract, no NaN.

    Raises:
        BundleError: the manifest breaks a rule that a reader would refuse it for.
    """
    _check(manifest)
    raw = encode(manifest)
    model = raw.pop("model")
    kv_cache = model.pop("kv_cache")
    head = {"schema_version": raw.pop("schema_version"), "adx_version": raw.pop("adx_version")}
    try:
        return json.dumps({**head, "model": model, "kv_cache": kv_cache, **raw}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise BundleError(f"the manifest cannot be written as JSON: {error}") from error


def from_json(text: str) -> Manifest:
    """A manifest out of `adx.json`'s text.

    Raises:
        BundleError: the schema is another one, a key is unknown or missing, a value has the wrong type, or a path
            would leave the bundle.
    """
    raw = parse_object(text, MANIFEST_NAME)
    _check_schema(raw)
    kv_cache, model = raw.pop("kv_cache", None), raw.get("model")
    if not isinstance(model, dict) or "kv_cache" in model:
        raise BundleError(f"{MANIFEST_NAME}: 'model' must be an object, and 'kv_cache' a key beside it")
    if not isinstance(kv_cache, dict):
        raise BundleError(f"{MANIFEST_NAME}: the key 'kv_cache' is missing or no object")
    manifest = decode(Manifest, {**raw, "model": {**model, "kv_cache": kv_cache}}, MANIFEST_NAME)
    _check(manifest)
    return manifest


def provenance(command: Sequence[str]) -> Provenance:
    """The record of this process: package versions, `command` with its secrets hidden, the time (UTC)."""
    packages = {"python": ".".join(map(str, sys.version_info[:3]))}
    packages |= {name: version for name in (DISTRIBUTION, *_PACKAGES) if (version := _version(name))}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(packages, redact(command), now)


def adx_version() -> str:
    """Version of the installed distribution."""
    return _version(DISTRIBUTION) or "0+unknown"


def redact(command: Iterable[str]) -> tuple[str, ...]:
    """Command-line arguments with tokens, passwords and logins in addresses replaced by `***`."""
    result: list[str] = []
    hide_next = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        secret = bool(_SECRET_OPTION.match(name))
        if hide_next:
            argument = _HIDDEN
        elif secret and equals:
            argument = f"{name}={_HIDDEN}"
        hide_next = secret and not equals and not hide_next
        result.append(_URL_LOGIN.sub(_HIDDEN, _SECRET_VALUE.sub(_HIDDEN, argument)))
    return tuple(result)


def check_relative(path: str, where: str = MANIFEST_NAME) -> str:
    """A path that stays inside the bundle on every system: `a/b.c`, forward slashes only.

    Raises:
        BundleError: it is absolute, names a drive, climbs with `..`, or holds backslashes or control characters.
    """
    parts = path.split("/")
    bad = (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in path
        or ":" in path
        or any(ord(character) < 32 or ord(character) == 127 for character in path)
    )
    if bad:
        raise BundleError(
            f"{where}: the path {path!r} is refused: paths must be relative, with forward slashes, and stay inside "
            "the bundle"
        )
    return path


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_schema(raw: Mapping[str, Any]) -> None:
    version = raw.get("schema_version")
    if type(version) is not int:
        raise BundleError(f"{MANIFEST_NAME}: 'schema_version' is missing or no integer")
    if version != SCHEMA_VERSION:
        writer = raw.get("adx_version")
        raise BundleError(
            f"{MANIFEST_NAME} has schema version {version}, and this adx ({adx_version()}) reads {SCHEMA_VERSION}: use "
            f"the version that wrote it (pip install '{DISTRIBUTION}=={writer}'), or export again with this one"
        )


def _check(manifest: Manifest) -> None:
    if manifest.schema_version != SCHEMA_VERSION:
        raise BundleError(f"schema version {manifest.schema_version} cannot be written, only {SCHEMA_VERSION}")
    listed = _check_files(manifest)
    named = [(graph.file, "graphs") for graph in manifest.graphs]
    for engine in manifest.engines:
        where = f"engines ({engine.target})"
        named += [(path, where) for path in engine.files]
        for phase, path in (("prefill", engine.prefill), ("decode", engine.decode)):
            if path not in engine.files:
                raise BundleError(f"{MANIFEST_NAME}: {where}: the {phase} file {path!r} is not among its files")
    for path, where in named:
        check_relative(path, f"{MANIFEST_NAME}: {where}")
        if manifest.files and path not in listed:
            raise BundleError(f"{MANIFEST_NAME}: {where} names {path!r}, which 'files' does not list")
    _check_numbers(manifest)
    _check_parity(manifest.parity)


def _check_files(manifest: Manifest) -> set[str]:
    seen: set[str] = set()
    for record in manifest.files:
        check_relative(record.path, f"{MANIFEST_NAME}: files")
        folded = record.path.casefold()
        if folded in seen or folded == MANIFEST_NAME:
            raise BundleError(f"{MANIFEST_NAME}: files lists {record.path!r} twice, or lists the manifest itself")
        if record.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", record.sha256):
            raise BundleError(f"{MANIFEST_NAME}: files: {record.path!r} has an impossible size or sha256")
        seen.add(folded)
    return {record.path for record in manifest.files}


def _check_numbers(manifest: Manifest) -> None:
    cache = manifest.kv_cache
    if len(cache.windows) != cache.layers:
        raise BundleError(f"{MANIFEST_NAME}: kv_cache: {len(cache.windows)} windows for {cache.layers} layers")
    if cache.dtype not in CACHE_DTYPES:
        raise BundleError(f"{MANIFEST_NAME}: kv_cache.dtype {cache.dtype!r} is none of {', '.join(CACHE_DTYPES)}")
    limits = [manifest.limits, *(engine.limits for engine in manifest.engines)]
    counts = {
        "kv_cache.layers": cache.layers,
        "kv_cache.kv_heads": cache.kv_heads,
        "kv_cache.head_dim": cache.head_dim,
        "kv_cache.capacity": cache.capacity,
        "kv_cache.windows": min((window for window in cache.windows if window is not None), default=1),
        "model.vocab_size": manifest.model.vocab_size,
        "model.heads": manifest.model.heads,
        "model.context_length": manifest.model.context_length,
        "limits": min(value for one in limits for value in dataclasses.astuple(one) if value is not None),
    }
    for name, value in counts.items():
        if value < 1:
            raise BundleError(f"{MANIFEST_NAME}: {name} must be 1 or more, found {value}")


def _check_parity(parity: Mapping[str, Any]) -> None:
    passed = parity.get("passed", "absent")
    if passed is not None and not isinstance(passed, bool):
        raise BundleError(f"{MANIFEST_NAME}: parity.passed must be true, false or null, found {passed!r}")
    if passed is None and not isinstance(parity.get("skipped"), str):
        raise BundleError(f"{MANIFEST_NAME}: parity was skipped, but parity.skipped does not say why")
