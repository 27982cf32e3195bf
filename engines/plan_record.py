"""What a plan was built with, kept beside it, and the check of a plan against it before TensorRT sees the file.

A plan runs only in the release and on the GPU that it was built for, and TensorRT executes what is in it: a damaged,
exchanged or foreign plan is refused here, in one message with what it was built with, what was found, and the command
that builds it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adx.engines.profiles import ShapeProfile
from adx.engines.tensorrt_build import PlanFacts, write_atomically
from adx.export.bundle import Bundle, file_sha256
from adx.export.errors import AdxError, BackendError, BundleError
from adx.export.manifest import Limits
from adx.export.manifest_json import decode, encode, parse_object
from adx.export.spec import GRAPHS, Phase

SCHEMA_VERSION = 1
AMPERE = 80  # a hardware-compatible plan runs from this compute capability on

_SEAL = "sha256"  # of the record's other keys


@dataclass(frozen=True)
class PlanOptions:
    """Options of the build that do not decide where the plan runs; see `BuildOptions`."""

    opt_level: int | None
    workspace_bytes: int | None
    refit: bool
    strip: bool


@dataclass(frozen=True)
class PlanRecord:
    """How a plan came to be.

    Attributes:
        library: the target, as `tensorrt-rtx`.
        library_version: as `1.7.1.116`.
        cuda: version of CUDA that the library came with, or None where nothing told.
        compute_capability: that it was built for, as `sm89`.
        hardware_compatible: it also runs on other GPUs, from sm80 on.
        version_compatible: it also runs in other releases with the same major version.
        phase: prefill or decode.
        limits: shape limits of the engine.
        profiles: shapes that the plan takes.
        graph_sha256: of the ONNX file that it was built from.
        weights_sha256: of that file's external weights.
        plan_sha256: of the plan.
        plan_bytes: size of the plan.
        facts: what was known of it when it had been built.
        options: of the build.
        adx_version: that built it.
    """

    library: str
    library_version: str
    cuda: str | None
    compute_capability: str
    hardware_compatible: bool
    version_compatible: bool
    phase: Phase
    limits: Limits
    profiles: tuple[ShapeProfile, ...]
    graph_sha256: str
    weights_sha256: str
    plan_sha256: str
    plan_bytes: int
    facts: PlanFacts
    options: PlanOptions
    adx_version: str
    schema_version: int = SCHEMA_VERSION


def record_path(plan: Path) -> Path:
    """Where a plan's record is: `decode.plan.json` beside `decode.plan`."""
    return plan.with_name(f"{plan.name}.json")


def to_json(record: PlanRecord) -> str:
    """The record's text, sealed: it holds a sha256 of all its other keys."""
    keys = encode(record)
    return json.dumps({**keys, _SEAL: _seal(keys)}, indent=2, allow_nan=False) + "\n"


def from_json(text: str, where: str) -> PlanRecord:
    """A record out of its text; `where` names it in messages.

    Raises:
        BundleError: it is no record of this schema, or was changed after it was written.
    """
    keys = parse_object(text, where)
    version = keys.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        raise BundleError(f"{where} has schema version {version!r}, and this adx reads {SCHEMA_VERSION}")
    seal = keys.pop(_SEAL, None)
    record = decode(PlanRecord, keys, where)
    if seal != _seal(keys):
        raise BundleError(f"{where} was changed after it was written: its own checksum does not match")
    for name in ("graph_sha256", "weights_sha256", "plan_sha256"):
        if not re.fullmatch(r"[0-9a-f]{64}", getattr(record, name)):
            raise BundleError(f"{where}.{name}: must be a sha256 in hex, found {getattr(record, name)!r}")
    if not re.fullmatch(r"sm\d{2,3}", record.compute_capability):
        raise BundleError(f"{where}.compute_capability: must be as 'sm89', found {record.compute_capability!r}")
    return record


def write_record(plan: Path, record: PlanRecord) -> Path:
    """Write a plan's record beside it, and say where.

    Raises:
        AdxError: it cannot be written.
    """
    path = record_path(plan)
    write_atomically(path, to_json(record).encode())
    return path


def check_records(bundle: Bundle) -> None:
    """Whether a bundle's plans are those of their records, built from the graphs that lie beside them.

    Needs neither a GPU nor TensorRT; `check_plan` holds a plan against those when it is loaded.

    Raises:
        BundleError: a record is damaged, or a plan comes from other graphs.
    """
    digests = {file.path: file.sha256 for file in bundle.manifest.files}
    graphs = next((engine for engine in bundle.manifest.engines if engine.target == GRAPHS), None)
    for engine in bundle.manifest.engines:
        for phase, plan in (("prefill", engine.prefill), ("decode", engine.decode)):
            if not plan.endswith(".plan") or graphs is None:
                continue
            path = record_path(bundle.path / plan)
            record = from_json(path.read_text(encoding="utf-8", errors="replace"), f"{plan}.json")
            weights = next(file for file in graphs.files if file not in (graphs.prefill, graphs.decode))
            sources = (digests.get(graphs.prefill if phase == "prefill" else graphs.decode), digests.get(weights))
            if (record.graph_sha256, record.weights_sha256) != sources or record.plan_sha256 != digests.get(plan):
                raise BundleError(
                    f"{plan} was not built from this bundle's graphs, as its record says: build it again: adx compile "
                    f"{bundle.path} --target {engine.target} --sm {engine.compute_capability}"
                )


def check_plan(
    plan_path: Path,
    *,
    library: str,
    library_version: str,
    compute_capability: str,
    graph_sha256: str,
    weights_sha256: str,
    rebuild: str,
) -> PlanRecord:
    """The record of a plan that may be given to the library found here.

    Args:
        library: the target whose library is loaded, as `tensorrt-rtx`.
        library_version: its version.
        compute_capability: of the GPU that is to run the plan, as `sm89`.
        graph_sha256: of the graph that the bundle holds for this phase.
        weights_sha256: of that graph's external weights.
        rebuild: the command that builds the plan again.

    Raises:
        BundleError: the plan or its record is missing, damaged or exchanged, or was built from another graph.
        BackendError: the plan is whole, but for another library, release or GPU.
    """
    found = _Found(plan_path, f"{library} {library_version}, {compute_capability}", rebuild)
    record = _read_record(found)
    _check_file(found, record)
    for what, built, here in (
        ("graph", record.graph_sha256, graph_sha256),
        ("weights", record.weights_sha256, weights_sha256),
    ):
        if built != here:
            problem = (
                f"it was built from another {what} than the bundle's (sha256 {built[:12]}..., found {here[:12]}...)"
            )
            raise found.refusal(BundleError, problem, record)
    if record.library != library:
        raise found.refusal(BackendError, f"it is a plan of {record.library}, and {library} cannot run it", record)
    if not _same_version(record, library_version):
        rule = "runs in releases of its major version" if record.version_compatible else "runs in its own release only"
        raise found.refusal(BackendError, f"it {rule}", record)
    if not _same_hardware(record, compute_capability):
        rule = f"runs from sm{AMPERE} on" if record.hardware_compatible else "runs on that compute capability only"
        raise found.refusal(BackendError, f"it {rule}", record)
    return record


@dataclass(frozen=True)
class _Found:
    """A plan, what would run it, and the command to build it again."""

    plan: Path
    here: str
    rebuild: str

    def refusal(self, kind: type[AdxError], problem: str, record: PlanRecord | None) -> AdxError:
        """The one message that every refusal is."""
        built = "unknown"
        if record is not None:
            built = f"{record.library} {record.library_version}, {record.compute_capability}"
            built += f", CUDA {record.cuda}" if record.cuda else ""
        return kind(
            f"{self.plan.name} cannot be used: {problem}. Built with: {built}. Found: {self.here}. Build it again: "
            f"{self.rebuild}"
        )


def _read_record(found: _Found) -> PlanRecord:
    path = record_path(found.plan)
    try:
        return from_json(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError as error:
        raise found.refusal(BundleError, f"its record {path.name} is missing", None) from error
    except (OSError, UnicodeDecodeError) as error:
        raise found.refusal(BundleError, f"its record {path.name} cannot be read ({error})", None) from error
    except BundleError as error:
        raise found.refusal(BundleError, f"its record is damaged ({error})", None) from error


def _check_file(found: _Found, record: PlanRecord) -> None:
    """The plan is the file that the record was written for."""
    try:
        size = found.plan.stat().st_size
        digest = file_sha256(found.plan) if size == record.plan_bytes else None
    except OSError as error:
        raise found.refusal(BundleError, f"it cannot be read ({error.strerror})", record) from error
    if digest is None:
        raise found.refusal(BundleError, f"it has {size} bytes, its record says {record.plan_bytes}", record)
    if digest != record.plan_sha256:
        problem = f"its content is not that of its record (sha256 {record.plan_sha256[:12]}..., found {digest[:12]}...)"
        raise found.refusal(BundleError, problem, record)


def _same_version(record: PlanRecord, version: str) -> bool:
    if record.version_compatible:
        return record.library_version.split(".")[0] == version.split(".")[0]
    return record.library_version == version


def _same_hardware(record: PlanRecord, capability: str) -> bool:
    if record.hardware_compatible:
        return int(re.sub(r"\D", "", capability) or 0) >= AMPERE
    return record.compute_capability == capability


def _seal(keys: dict[str, Any]) -> str:
    """sha256 of the keys in an order and form of their own."""
    text = json.dumps(keys, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
