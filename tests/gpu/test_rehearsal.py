"""The checks themselves, without a GPU: on a stand-in for TensorRT that computes with ONNX Runtime they pass, and each
of them sees the fault that it is for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_checks
import numpy as np
import pytest
from cuda_fake import FakeCuda, FakeTensorRT, write_plan
from numpy.typing import NDArray
from static_graphs import paths, session
from traced import Traced, traced

from adx.export.errors import BackendError
from adx.runtime.cuda import Cuda
from adx.runtime.ort_graphs import load_graph
from adx.runtime.static_session import StaticSession
from adx.runtime.tensorrt_engine import TensorRTExecutor
from adx.runtime.tensorrt_plan import LoadedPlan

Arrays = Mapping[str, NDArray[Any]]
Fault = Callable[[str, Arrays], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory, "llama")


@functools.cache
def graph(path: Path) -> Any:
    return load_graph(path, 1)


def stand_in(source: Traced, folder: Path, fault: Fault | None = None, *, cuda_graph: bool = True) -> StaticSession:
    """A session over plans of a made-up TensorRT that computes what the graphs say, then does what `fault` does."""
    cuda, graphs, kv_cache = FakeCuda(), paths(source), source.spec.kv_cache

    def compute(phase: str, arrays: Arrays) -> None:
        computed = graph(graphs[phase])
        names = [output.name for output in computed.get_outputs()]
        inputs = {each.name: arrays[each.name].copy() for each in computed.get_inputs()}
        for name, value in zip(names, computed.run(names, inputs), strict=True):
            arrays[name][...] = value
        if fault is not None:
            fault(phase, arrays)

    plans = {}
    for phase, path in graphs.items():
        used = {each.name for each in graph(path).get_inputs()}
        unused = {name: None for name in ("row_lengths", "pad_lengths") if name not in used}
        plans[phase] = write_plan(folder / f"{phase}.plan", phase, kv_cache, source.vocab_size, tensors=unused)
    executor = TensorRTExecutor(
        FakeTensorRT(cuda, compute), Cuda(cuda, 0), plans, kv_cache, source.vocab_size, cuda_graph=cuda_graph
    )
    return StaticSession(
        executor,
        kv_cache,
        source.vocab_size,
        max_batch_size=executor.max_batch_size,
        prefill_chunk=executor.prefill_tokens,
        decode_tokens=executor.decode_tokens,
        fixed_places=True,
    )


def test_every_check_passes(llama: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the buffers are arrays, as those of ONNX Runtime on the CPU."""
    one = stand_in(llama, tmp_path)
    graphs = session(llama, max_batch_size=2)
    for each in (one, graphs):
        gpu_checks.check_greedy(each, graphs)
        gpu_checks.check_cache_in_place(each)
        gpu_checks.check_limits(each)
    gpu_checks.check_profiles(one)
    gpu_checks.check_cuda_graph(one, stand_in(llama, tmp_path, cuda_graph=False), monkeypatch)
    assert "first token" in gpu_checks.latency(one)


def test_a_token_that_is_not_the_likeliest_is_seen(llama: Traced, tmp_path: Path) -> None:
    def other(phase: str, arrays: Arrays) -> None:
        if phase == "decode":
            arrays["logits"][..., 7] += 30

    with pytest.raises(AssertionError, match=r"row 0, step 1: token 7, not \d+"):
        gpu_checks.check_greedy(stand_in(llama, tmp_path, other), session(llama, max_batch_size=2))


def test_a_cache_that_is_copied_elsewhere_is_seen(llama: Traced, tmp_path: Path) -> None:
    """A step's keys land a place too far, or the whole row is written anew a little differently."""

    def shifted(phase: str, arrays: Arrays) -> None:
        if phase == "decode":
            buffer = arrays["present.1.key"]
            buffer[...] = np.roll(buffer, 1, axis=2)

    def rounded(phase: str, arrays: Arrays) -> None:
        if phase == "decode":
            arrays["present.0.value"][...] *= np.float16(1.01)

    for fault in (shifted, rounded):
        with pytest.raises(AssertionError, match=r"wrote nothing at place 5|changed the places"):
            gpu_checks.check_cache_in_place(stand_in(llama, tmp_path, fault))


def test_a_step_that_is_recorded_wrongly_is_seen(
    llama: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was not recorded at all, and one that reads the inputs of another step for ever."""
    plain = stand_in(llama, tmp_path, cuda_graph=False)
    with pytest.raises(AssertionError, match="all others are replayed"):
        gpu_checks.check_cuda_graph(stand_in(llama, tmp_path, cuda_graph=False), plain, monkeypatch)
    stale = stand_in(llama, tmp_path)
    monkeypatch.setattr(stale._executor, "_stage", _first_only(stale._executor._stage))
    with pytest.raises(AssertionError):
        gpu_checks.check_cuda_graph(stale, plain, monkeypatch)


def _first_only(stage: Callable[..., int]) -> Callable[..., int]:
    """`_stage` that writes a step's integers once only."""
    seen: list[int] = []

    def staged(inputs: Any) -> int:
        if inputs["input_ids"].shape[1] > 1 or not seen:
            size = stage(inputs)
            if inputs["input_ids"].shape[1] == 1:
                seen.append(size)
            return size
        return seen[0]

    return staged


def test_a_call_beyond_a_profile_that_runs_is_seen(
    llama: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing looks at the shapes before the launch, the library refuses them."""
    one = stand_in(llama, tmp_path)
    monkeypatch.setattr(LoadedPlan, "choose", lambda plan, batch, length: len(plan.profiles) - 1)
    with pytest.raises(BackendError, match="does not take"):
        gpu_checks.check_profiles(one)
