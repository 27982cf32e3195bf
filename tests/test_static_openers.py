"""From a bundle to a session: which engine is opened, what is checked before, and what is refused with what to do."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_fake import FakeCuda, FakeTensorRT, write_plan
from static_graphs import written
from traced import Traced, reference, tokens, traced

from adx.engines.devices import Gpu
from adx.engines.plan_record import PlanOptions, PlanRecord, record_path, write_record
from adx.engines.tensorrt_build import PlanFacts
from adx.export.bundle import Bundle
from adx.export.errors import BackendError, BundleError, UsageError
from adx.export.manifest import EngineRecord, FileRecord, Limits, Manifest, Provenance, QuantizationRecord
from adx.export.spec import KVCacheSpec, ModelSpec
from adx.runtime import static_openers
from adx.runtime.cuda import Cuda
from adx.runtime.static_openers import (
    open_onnx,
    open_ort_cuda,
    open_ort_tensorrt,
    open_plans,
    open_tensorrt,
    open_tensorrt_rtx,
)

SPEC = KVCacheSpec(layers=1, kv_heads=2, head_dim=16, capacity=64, windows=(None,))
LIMITS = Limits(2, 16, 24)
GRAPHS = ("engines/onnx/prefill.onnx", "engines/onnx/decode.onnx", "engines/onnx/weights.data")
FACTS = PlanFacts(1, 1.0, 1.0, {}, {}, 2, 1, 0, 0, None, None, None, 1.0, ())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def bundle_of(folder: Path, engines: list[EngineRecord], kv_cache: KVCacheSpec, vocab_size: int, **more: Any) -> Bundle:
    """A bundle of whatever lies in the folder."""
    model = ModelSpec("m", None, "LlamaForCausalLM", "llama", "float32", 1, vocab_size, 64, 4, 128, kv_cache, "0" * 64)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    records = tuple(FileRecord(f.relative_to(folder).as_posix(), f.stat().st_size, sha256(f)) for f in files)
    manifest = Manifest(
        "0.1.0",
        model,
        more.get("graphs", ()),
        QuantizationRecord("fp16", None, ()),
        tuple(engines),
        LIMITS,
        {"passed": True},
        Provenance({}, (), ""),
        records,
    )
    return Bundle(folder, manifest)


def onnx_engine(limits: Limits = LIMITS) -> EngineRecord:
    return EngineRecord("onnx", GRAPHS, GRAPHS[0], GRAPHS[1], {}, None, None, limits)


def plans(
    folder: Path, sm: str = "sm89", phases: tuple[str, str] = ("prefill", "decode"), **changes: Any
) -> EngineRecord:
    """Plans of the fake TensorRT with sound records, but for `changes`."""
    place = f"engines/tensorrt/{sm}"
    (folder / place).mkdir(parents=True, exist_ok=True)
    for name in GRAPHS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for file, phase in zip(("prefill", "decode"), phases, strict=True):
        kv_cache = dataclasses.replace(SPEC, capacity=LIMITS.max_seq_len)
        plan = write_plan(folder / place / f"{file}.plan", phase, kv_cache, 32)
        graph = GRAPHS[0] if phase == "prefill" else GRAPHS[1]
        record = PlanRecord(
            library="tensorrt",
            library_version="10.14.1",
            cuda="13",
            compute_capability=sm,
            hardware_compatible=False,
            version_compatible=False,
            phase=phase,  # type: ignore[arg-type]
            limits=LIMITS,
            profiles=(),
            graph_sha256=sha256(folder / graph),
            weights_sha256=sha256(folder / GRAPHS[2]),
            plan_sha256=sha256(plan),
            plan_bytes=plan.stat().st_size,
            facts=FACTS,
            options=PlanOptions(None, None, False, False),
            adx_version="0.1.0",
        )
        write_record(plan, dataclasses.replace(record, **changes))
    names = tuple(f"{place}/{file}.plan{end}" for file in ("prefill", "decode") for end in ("", ".json"))
    return EngineRecord("tensorrt", names, names[0], names[2], {}, None, sm, LIMITS)


def zeros(phase: str, arrays: Any) -> None:
    arrays["logits"][...] = 0


def opened(bundle: Bundle, capability: tuple[int, int] = (8, 9)) -> tuple[FakeTensorRT, Any]:
    cuda = FakeCuda(capability=capability)
    trt = FakeTensorRT(cuda, zeros)
    return trt, open_plans(bundle, trt, Cuda(cuda, 0), cuda_graph=True)  # type: ignore[arg-type]


def test_plans_of_the_gpu_that_is_here_are_opened(tmp_path: Path) -> None:
    engines = [plans(tmp_path, sm) for sm in ("sm80", "sm89", "sm120")]
    bundle = bundle_of(tmp_path, [onnx_engine(), *engines], SPEC, 32)
    for capability, engine in zip([(8, 0), (8, 9), (12, 0)], engines, strict=True):
        assert static_openers.choose_engine(bundle, "tensorrt", "sm{}{}".format(*capability)) == engine
    trt, session = opened(bundle)
    assert (session.provider, session.capacity, session.max_batch_size, session.max_input_len) == (trt.name, 24, 2, 16)
    assert not trt.runtime.engine_host_code_allowed
    cache = session.new_cache(2, 20)
    assert cache.buffers[0].shape == (2, 2, 24, 16)
    ids = np.full((2, 13), 4)  # longer than the plan takes at once
    assert session.prefill(ids, np.array([13, 2]), cache).shape == (2, 32)
    assert session.decode(ids[:, :5], cache).shape == (2, 5, 32)


def test_a_gpu_that_nothing_was_built_for_is_refused_with_the_command(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [onnx_engine(), plans(tmp_path, "sm80"), plans(tmp_path, "sm89")], SPEC, 32)
    command = rf"adx compile {tmp_path} --target tensorrt --sm sm120"
    with pytest.raises(
        BackendError, match=f"built for sm80, sm89, and the GPU here is sm120: build one with `{command}`"
    ):
        opened(bundle, (12, 0))


def test_a_hardware_compatible_plan_runs_on_a_newer_gpu(tmp_path: Path) -> None:
    engines = [plans(tmp_path, "sm80"), plans(tmp_path, "sm86", hardware_compatible=True)]
    bundle = bundle_of(tmp_path, [onnx_engine(), *engines], SPEC, 32)
    _, session = opened(bundle, (12, 0))
    assert session.max_batch_size == 2
    record_path(tmp_path / engines[1].decode).unlink()
    with pytest.raises(BackendError, match="built for sm80, sm86"):
        opened(bundle, (12, 0))


def test_a_version_compatible_plan_may_run_the_code_that_it_brings(tmp_path: Path) -> None:
    engine = plans(tmp_path, version_compatible=True, library_version="10.15.0")
    trt, _ = opened(bundle_of(tmp_path, [onnx_engine(), engine], SPEC, 32))
    assert trt.runtime.engine_host_code_allowed


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"library_version": "10.15.0"}, BackendError, "runs in its own release only. Built with: tensorrt 10.15.0, sm89"),
    ({"library": "tensorrt-rtx"}, BackendError, "a plan of tensorrt-rtx, and tensorrt cannot run it"),
    ({"graph_sha256": "0" * 64}, BundleError, "another graph than the bundle's"),
    ({"weights_sha256": "0" * 64}, BundleError, "another weights than the bundle's"),
    ({"options": PlanOptions(None, None, True, True)}, BackendError, "prefill.plan was built without its weights"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_a_record_that_does_not_fit_is_refused_before_tensorrt_sees_the_plan(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    bundle = bundle_of(tmp_path, [onnx_engine(), plans(tmp_path, **changes)], SPEC, 32)
    cuda = FakeCuda()
    trt = FakeTensorRT(cuda, zeros)
    with pytest.raises(kind, match=text) as raised:
        open_plans(bundle, trt, Cuda(cuda, 0), cuda_graph=True)  # type: ignore[arg-type]
    assert f"adx compile {tmp_path} --target tensorrt --sm sm89" in str(raised.value)
    assert trt.runtime is None


def test_prefill_and_decode_exchanged_are_refused(tmp_path: Path) -> None:
    engine = plans(tmp_path, phases=("decode", "prefill"))
    with pytest.raises(BundleError, match=r"prefill\.plan cannot be used: it was built from another graph"):
        opened(bundle_of(tmp_path, [onnx_engine(), engine], SPEC, 32))


def test_a_plan_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    engine = plans(tmp_path)
    bundle = bundle_of(tmp_path, [onnx_engine(), engine], SPEC, 32)
    plan = tmp_path / engine.decode
    plan.write_bytes(plan.read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"decode\.plan cannot be used: it has \d+ bytes"):
        opened(bundle)


def test_a_target_that_the_bundle_does_not_hold_is_named(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [], SPEC, 32)
    for call, target in ((open_tensorrt, "tensorrt"), (open_tensorrt_rtx, "tensorrt-rtx")):
        with pytest.raises(
            BackendError, match=rf"no {target} engine \(it holds: none\): `adx compile {tmp_path} --target"
        ):
            call(bundle, None)
    for other in (open_onnx, open_ort_cuda, open_ort_tensorrt):
        with pytest.raises(BackendError, match=r"holds no onnx engine \(it holds: none\): export it for a GPU target"):
            other(bundle, None)


def test_threads_for_an_engine_on_a_gpu_are_refused(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [onnx_engine(), plans(tmp_path)], SPEC, 32)
    for call in (open_tensorrt, open_tensorrt_rtx, open_ort_cuda, open_ort_tensorrt):
        with pytest.raises(UsageError, match="threads: this engine computes on the GPU"):
            call(bundle, 2)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver shows a device."""
    monkeypatch.setattr("adx.engines.devices.gpus", lambda: (Gpu("a GPU", "sm89"),))


def test_a_missing_gpu_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the packages that would be missing as well."""
    monkeypatch.setattr("adx.engines.devices.gpus", tuple)
    bundle = bundle_of(tmp_path, [onnx_engine(), plans(tmp_path)], SPEC, 32)
    for call in (open_tensorrt, open_ort_cuda, open_ort_tensorrt):
        with pytest.raises(BackendError, match="no NVIDIA GPU here"):
            call(bundle, None)


@pytest.mark.usefixtures("gpu")
def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [onnx_engine(), plans(tmp_path)], SPEC, 32)
    try:
        import tensorrt
    except ImportError:
        with pytest.raises(BackendError, match="TensorRT is not installed: pip install"):
            open_tensorrt(bundle, None)
    else:
        pytest.skip(f"TensorRT {tensorrt.__version__} is installed here")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def graphs(llama: Traced, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with the graphs of a real model."""
    engine = written(llama)
    folder = tmp_path_factory.mktemp("bundle")
    shutil.copytree(llama.scratch / "engines" / "onnx", folder / "engines" / "onnx")
    limits = Limits(2, 40, 48)
    return bundle_of(folder, [onnx_engine(limits)], llama.spec.kv_cache, llama.vocab_size, graphs=engine.graphs)


def test_the_graphs_run_on_the_cpu(llama: Traced, graphs: Bundle) -> None:
    session = open_onnx(graphs, 1)
    assert (session.provider, session.threads, session.capacity) == ("CPUExecutionProvider", 1, 48)
    assert (session.max_batch_size, session.max_input_len) == (2, 40)
    ids = tokens(1, 2, 12)
    wanted = reference(llama.model, ids)
    found = session.prefill(ids, np.full(2, 12), session.new_cache(2))
    assert np.abs(found - wanted[:, -1]).max() <= 1e-2 * np.ptp(wanted)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_provider_that_is_missing_is_an_error(graphs: Bundle) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("ONNX Runtime here has its CUDA provider")
    with pytest.raises(BackendError, match="CUDAExecutionProvider was asked for"):
        open_ort_cuda(graphs, None)
    with pytest.raises(BackendError, match="TensorrtExecutionProvider was asked for"):
        open_ort_tensorrt(graphs, None)


@pytest.mark.usefixtures("gpu")
def test_onnx_runtimes_tensorrt_is_told_the_shapes_that_the_session_will_use(
    graphs: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the session reads at once lies within the profiles that the provider compiles."""
    seen: list[Any] = []

    class Taken:
        provider, threads = "taken", 1

        def __init__(self, *arguments: Any, **more: Any) -> None:
            seen.extend(arguments)

        def new_buffers(self, batch_size: int, places: int) -> list[object]:
            seen.append(places)
            return []

    monkeypatch.setattr("adx.runtime.ort_device.OrtDevice", Taken)
    session = open_ort_tensorrt(graphs, None, cache_folder=tmp_path)
    provider = seen[3]
    assert "input_ids:2x40,write_indices:2" in provider.options["prefill"]["trt_profile_max_shapes"]
    assert "input_ids:2x16,write_indices:2" in provider.options["decode"]["trt_profile_max_shapes"]
    assert "past_key_values.0.key:1x2x48x16" in provider.options["decode"]["trt_profile_min_shapes"]
    assert provider.fixed_dims == {"cache_length": 48}
    session.new_cache(1, 10)
    assert seen[-1] == 48
