"""ONNX Runtime's device executor: what it computes, through its CPU provider, and that no CPU stands in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import reference_logits
from static_graphs import executor, paths
from traced import Traced, tokens, traced

from adx.engines.profiles import ShapeProfile
from adx.export.errors import BackendError, BundleError
from adx.runtime.ort_device import (
    CPU,
    DeviceProvider,
    OrtDevice,
    check_placement,
    check_provider,
    cuda_provider,
    tensorrt_provider,
)
from adx.runtime.static_session import StaticSession

HOST = DeviceProvider(CPU, "cpu", "")
RAGGED = np.array([9, 4])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: the model is tiny."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def device(llama: Traced) -> OrtDevice:
    """The executor on host memory, where ONNX Runtime can run here: all but the provider's name is the same."""
    return OrtDevice(paths(llama), llama.spec.kv_cache, llama.vocab_size, HOST)


def test_it_computes_what_transformers_does(llama: Traced, device: OrtDevice) -> None:
    session = StaticSession(device, llama.spec.kv_cache, llama.vocab_size, prefill_chunk=5, decode_tokens=3)
    ids = tokens(1, 2, 9)
    cache = session.new_cache(2, 20)
    found = [session.prefill(ids, RAGGED, cache).copy()[:, None]]
    more = tokens(2, 2, 6)
    found += [session.decode(more[:, at : at + 1], cache).copy() for at in range(2)]
    found += [session.decode(more[:, 2:], cache).copy()]
    for row, length in enumerate(RAGGED):
        wanted = reference_logits(llama.model, [*ids[row, :length], *more[row]])[length - 1 :]
        assert np.abs(np.concatenate(found, axis=1)[row] - wanted).max() <= 1e-2 * np.ptp(wanted)


def test_it_computes_the_same_as_the_executor_for_the_cpu(llama: Traced, device: OrtDevice) -> None:
    ids = tokens(1, 2, 9)
    inputs = {"input_ids": ids, "write_indices": np.zeros(2, np.int64), "row_lengths": RAGGED}
    inputs["pad_lengths"] = np.zeros(2, np.int64)
    results = []
    for run in (device, executor(llama)):
        cache = StaticSession(run, llama.spec.kv_cache, llama.vocab_size).new_cache(2, 12)
        results.append((run.run("prefill", inputs, cache).copy(), [np.array(_numpy(b)) for b in cache.buffers]))
    assert np.array_equal(results[0][0], results[1][0])
    assert all(np.array_equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def _numpy(buffer: Any) -> Any:
    return buffer if isinstance(buffer, np.ndarray) else buffer.numpy()


def test_the_cache_and_the_integers_of_a_step_stay_where_they_are(llama: Traced, device: OrtDevice) -> None:
    session = StaticSession(device, llama.spec.kv_cache, llama.vocab_size)
    cache = session.new_cache(1)
    where = [buffer.data_ptr() for buffer in cache.buffers]
    session.prefill(tokens(1, 1, 4), np.array([4]), cache)
    session.decode(tokens(2, 1, 1), cache)
    (step,) = cache.bound.values()
    integers = [value.data_ptr() for value in step.inputs.values()]  # type: ignore[attr-defined]
    session.decode(tokens(3, 1, 1), cache)
    assert list(cache.bound.values()) == [step]
    assert [value.data_ptr() for value in step.inputs.values()] == integers  # type: ignore[attr-defined]
    assert [buffer.data_ptr() for buffer in cache.buffers] == where


@pytest.mark.parametrize("provider", [cuda_provider(), tensorrt_provider({}, 64, None)], ids=lambda one: one.name)
def test_a_device_that_is_not_there_is_an_error_and_never_the_cpu(llama: Traced, provider: DeviceProvider) -> None:
    """ONNX Runtime itself only warns, and computes on the CPU."""
    import onnxruntime

    if provider.name in onnxruntime.get_available_providers():
        pytest.skip(f"{provider.name} is installed here")
    with pytest.raises(
        BackendError,
        match=rf"{provider.name} was asked for, and ONNX Runtime .* here has .*CPUExec.*adx-toolchain\[gpu\]",
    ):
        OrtDevice(paths(llama), llama.spec.kv_cache, llama.vocab_size, provider)


def placed(providers: list[str], **nodes: list[str]) -> Any:
    """A session that says which provider runs which operators."""
    parts = [
        SimpleNamespace(
            ep_name=name, get_nodes=lambda ops=ops: [SimpleNamespace(op_type=op, name=f"n.{op}") for op in ops]
        )
        for name, ops in nodes.items()
    ]
    return SimpleNamespace(get_providers=lambda: providers, get_provider_graph_assignment_info=lambda: parts)


def test_a_provider_that_does_not_start_is_an_error() -> None:
    """Installed, but without its libraries or a GPU: ONNX Runtime logs a line and gives a session on the CPU."""
    session = placed([CPU], **{CPU: ["MatMul"]})
    with pytest.raises(
        BackendError, match="installed, but does not start here, and CPUExecutionProvider would compute"
    ):
        check_placement(session, cuda_provider())
    with pytest.raises(BackendError, match=r"compute instead: Failed to load libcublas\.so\.12"):
        check_placement(session, cuda_provider(), "Failed to load libcublas.so.12")


def test_nodes_without_a_kernel_on_the_device_are_an_error() -> None:
    cuda = cuda_provider()
    both = [cuda.name, CPU]
    check_placement(placed(both, **{cuda.name: ["MatMul", "Attention"], CPU: ["Shape", "Range", "Unsqueeze"]}), cuda)
    with pytest.raises(
        BackendError, match=r"no kernel for TensorScatter \(n\.TensorScatter\), Attention \(n\.Attention\), and the CPU"
    ):
        check_placement(placed(both, **{cuda.name: ["MatMul"], CPU: ["Shape", "TensorScatter", "Attention"]}), cuda)
    with pytest.raises(BackendError, match="and 2 more, and the CPU"):
        check_placement(placed(both, **{CPU: ["MatMul"] * 5}), cuda)


def test_the_placement_of_every_node_is_known(device: OrtDevice) -> None:
    """The check above reads what ONNX Runtime recorded: recorded it must be."""
    parts = device.sessions["decode"].get_provider_graph_assignment_info()
    counted = [node.op_type for part in parts for node in part.get_nodes()]
    assert counted.count("Attention") == 2
    assert counted.count("TensorScatter") == 4


def test_libraries_that_cannot_be_found_are_quoted_and_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("Failed to load libcudnn.so.9:\n not found"))
    assert check_provider(cuda_provider()) == "Failed to load libcudnn.so.9: not found"
    assert capsys.readouterr().out == ""


def test_profiles_reach_tensorrt_in_its_spelling() -> None:
    """`input_ids:1x1,write_indices:1`; the widest profile, since this provider takes one."""
    step = ShapeProfile("step", {"input_ids": ((1, 1), (1, 1), (1, 1))})
    chunk = ShapeProfile("chunk", {"input_ids": ((1, 1), (2, 8), (2, 16)), "write_indices": ((1,), (2,), (2,))})
    provider = tensorrt_provider({"decode": (step, chunk)}, 64, Path("/cache"))
    options = provider.options["decode"]
    assert options["trt_profile_min_shapes"] == "input_ids:1x1,write_indices:1"
    assert options["trt_profile_opt_shapes"] == "input_ids:2x8,write_indices:2"
    assert options["trt_profile_max_shapes"] == "input_ids:2x16,write_indices:2"
    assert (options["trt_engine_cache_enable"], options["trt_engine_cache_path"]) == ("1", "/cache")
    assert provider.fixed_dims == {"cache_length": 64}
    assert "trt_engine_cache_path" not in tensorrt_provider({"decode": (chunk,)}, 64, None).options["decode"]


def test_a_fixed_cache_length_reaches_the_graph(llama: Traced) -> None:
    provider = DeviceProvider(CPU, "cpu", "", fixed_dims={"cache_length": 32})
    run = OrtDevice(paths(llama), llama.spec.kv_cache, llama.vocab_size, provider)
    past = next(i for i in run.sessions["decode"].get_inputs() if i.name == "past_key_values.0.key")
    assert past.shape[2] == 32


def test_a_graph_that_is_damaged_is_the_bundles_fault(llama: Traced, tmp_path: Path) -> None:
    (tmp_path / "prefill.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"cannot load .*prefill\.onnx on CPUExecutionProvider"):
        OrtDevice({"prefill": tmp_path / "prefill.onnx"}, llama.spec.kv_cache, 256, HOST)
