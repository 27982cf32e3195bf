"""TensorRT's executor on a recording GPU: order of calls, addresses, the cache in place, CUDA graphs, errors, close."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_fake import (
    ILLEGAL_ADDRESS,
    NO_CAPTURE,
    NO_DEVICE,
    NO_MEMORY,
    TEXTS,
    Arrays,
    FakeContext,
    FakeCuda,
    FakeEngine,
    FakeTensorRT,
    write_plan,
)
from numpy.typing import NDArray

from adx.engines.tensorrt_library import load_library
from adx.export.errors import BackendError, BundleError, ContextLengthError, UsageError
from adx.export.spec import KVCacheSpec
from adx.runtime.cuda import Cuda, PinnedMemory
from adx.runtime.fake import FakeSession
from adx.runtime.loop import generate_tokens
from adx.runtime.params import SamplingParams
from adx.runtime.static_session import StaticSession
from adx.runtime.tensorrt_engine import TensorRTExecutor

VOCAB = 32
SPEC = KVCacheSpec(layers=2, kv_heads=2, head_dim=16, capacity=24, windows=(None, None))
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def logits_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Any function of all tokens and their order."""
    weights = np.arange(1, len(tokens) + 1)
    chosen = int((weights * np.asarray(tokens)).sum() * 7 + len(tokens)) % VOCAB
    return np.eye(VOCAB, dtype=np.float32)[chosen]


def compute(phase: str, arrays: Arrays) -> None:
    """An engine whose keys and values are the tokens themselves: logits follow from what each row's cache holds.

    New tokens are written through the outputs and old ones read through the inputs, so a cache in two places is lost.
    """
    ids, starts = arrays["input_ids"], arrays["write_indices"]
    batch, length = ids.shape
    for layer in range(SPEC.layers):
        for part in ("key", "value"):
            present = arrays[f"present.{layer}.{part}"]
            assert starts.max() + length <= present.shape[2], "written past the cache's last place"
            for row in range(batch):
                present[row, :, starts[row] : starts[row] + length] = ids[row][None, :, None]
    past = [arrays[f"past_key_values.{layer}.{part}"] for layer in range(SPEC.layers) for part in ("key", "value")]
    assert all(np.isfinite(one).all() for one in past), "a cache that is not cleared"
    assert not arrays["pad_lengths"].any()
    for row in range(batch):
        assert all((one[row] == past[0][row, :1, :, :1]).all() for one in past), "a layer has another's cache"
        held = past[0][row, 0, :, 0].astype(int).tolist()
        if phase == "prefill":
            last = min(max(arrays["row_lengths"][row] - 1, starts[row]), starts[row] + length - 1)
            arrays["logits"][row, 0] = logits_of(held[: last + 1])
        else:
            for step in range(length):
                arrays["logits"][row, step] = logits_of(held[: starts[row] + step + 1])


class Machine:
    """A session on fakes, and the fakes."""

    def __init__(self, folder: Path, *, cuda_graph: bool = True, **changes: Any) -> None:
        self.cuda = FakeCuda()
        self.trt = FakeTensorRT(self.cuda, compute)
        self.plans = {p: write_plan(folder / f"{p}.plan", p, SPEC, VOCAB, **changes) for p in ("prefill", "decode")}
        self.executor = TensorRTExecutor(self.trt, Cuda(self.cuda, 0), self.plans, SPEC, VOCAB, cuda_graph=cuda_graph)
        self.session = StaticSession(
            self.executor,
            SPEC,
            VOCAB,
            max_batch_size=self.executor.max_batch_size,
            prefill_chunk=self.executor.prefill_tokens,
            decode_tokens=self.executor.decode_tokens,
            fixed_places=True,
        )

    def events_of(self, work: Callable[[], object]) -> list[tuple[Any, ...]]:
        """What a piece of work called."""
        before = len(self.cuda.events)
        work()
        return self.cuda.events[before:]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def generated(session: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[int | None, ...]]:
    return [step.tokens for step in generate_tokens(session, prompts, GREEDY)]


def column(*tokens: int) -> NDArray[np.int64]:
    return np.array(tokens, np.int64)[:, None]


PROMPTS = [[[5, 6, 7]], [[5, 6, 7], [9]], [[*range(3, 23)]], [[*range(3, 15)], [8, 4]]]


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("prompts", PROMPTS, ids=["one", "ragged", "chunks", "ragged chunks"])
def test_the_token_loop_runs_as_on_any_session(tmp_path: Path, prompts: list[list[int]], cuda_graph: bool) -> None:
    """The recording GPU does work only when it is waited for, so a missing copy or wait changes the tokens."""
    fake = FakeSession(logits_of, VOCAB, capacity=SPEC.capacity)
    assert generated(Machine(tmp_path, cuda_graph=cuda_graph).session, prompts) == generated(fake, prompts)


def test_several_new_tokens_and_logits_of_every_position(machine: Machine) -> None:
    ids = np.arange(3, 13)[None]
    cache = machine.session.new_cache(1)
    every = machine.session.prefill(ids, np.array([10]), cache, "all").copy()
    assert every[0].tolist() == [logits_of(ids[0, : n + 1]).tolist() for n in range(10)]
    more = np.arange(13, 20)[None]  # more than one call takes
    found = machine.session.decode(more, cache)
    whole = [*ids[0], *more[0]]
    assert found[0].tolist() == [logits_of(whole[: 11 + n]).tolist() for n in range(7)]


def test_shapes_come_before_addresses_and_both_before_the_launch(machine: Machine) -> None:
    cache = machine.session.new_cache(2)
    events = machine.events_of(lambda: machine.session.prefill(np.full((2, 3), 4), np.array([3, 2]), cache))
    names = [event[0] for event in events]
    kinds = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    assert kinds == [
        "cudaSetDevice",
        "profile",
        "shape",
        "address",
        "cudaMemcpyAsync",
        "enqueue",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
    ]
    to_device, to_host = (event for event in events if event[0] == "cudaMemcpyAsync")
    assert to_device[4] == FakeCuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    assert to_host[3:5] == (2 * VOCAB * 4, FakeCuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    shapes = {event[2]: event[3] for event in events if event[0] == "shape"}
    assert shapes["input_ids"] == (2, 3)
    assert shapes["row_lengths"] == (2,)
    assert shapes["past_key_values.1.value"] == (2, 2, 24, 16)
    assert "row_lengths" not in {
        event[2]
        for event in machine.events_of(lambda: machine.session.decode(column(4, 4), cache))
        if event[0] == "shape"
    }


def test_past_and_present_are_one_buffer(machine: Machine) -> None:
    cache = machine.session.new_cache(1)
    events = machine.events_of(lambda: machine.session.prefill(np.full((1, 2), 4), np.array([2]), cache))
    addresses = {event[2]: event[3] for event in events if event[0] == "address"}
    buffers = [buffer.address for buffer in cache.buffers]
    assert len(set(buffers)) == 4
    names = [(layer, part) for layer in range(2) for part in ("key", "value")]
    assert [addresses[f"past_key_values.{layer}.{part}"] for layer, part in names] == buffers
    assert [addresses[f"present.{layer}.{part}"] for layer, part in names] == buffers


@pytest.mark.parametrize(("new", "profile"), [(1, 0), (2, 1), (4, 1)])
def test_each_number_of_new_tokens_has_its_profile(machine: Machine, new: int, profile: int) -> None:
    cache = machine.session.new_cache(2)
    machine.session.prefill(column(4, 5), np.array([1, 1]), cache)
    events = machine.events_of(lambda: machine.session.decode(np.full((2, new), 4), cache))
    assert [event for event in events if event[0] in ("profile", "enqueue")] == [
        ("profile", "decode", profile),
        ("enqueue", "decode", profile),
    ]


def test_a_call_that_no_profile_takes_is_refused_before_it_is_launched(machine: Machine) -> None:
    """The session's own pieces are made to fit; an executor that is called otherwise says what the engine takes."""
    cache = machine.session.new_cache(2)
    inputs = {"input_ids": np.zeros((2, 9), np.int64), "write_indices": np.zeros(2, np.int64)}
    inputs |= {"row_lengths": np.full(2, 9), "pad_lengths": np.zeros(2, np.int64)}
    before = machine.cuda.names().count("enqueue")
    with pytest.raises(UsageError, match="length 9: this engine takes 1 to 8 in prefill"):
        machine.executor.run("prefill", inputs, cache)
    with pytest.raises(UsageError, match="takes 1 to 2"):
        machine.session.new_cache(3)
    with pytest.raises(ContextLengthError):
        machine.session.prefill(np.zeros((1, 25), np.int64), np.array([25]), machine.session.new_cache(1))
    assert machine.cuda.names().count("enqueue") == before


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_steps_allocate_nothing_and_move_nothing(tmp_path: Path, cuda_graph: bool) -> None:
    machine = Machine(tmp_path, cuda_graph=cuda_graph)
    cache = machine.session.new_cache(2)
    machine.session.prefill(column(4, 5), np.array([1, 1]), cache)
    for _ in range(2):
        machine.session.decode(column(6, 7), cache)
    where = [buffer.address for buffer in cache.buffers]
    before = len(machine.cuda.events)
    live = dict(machine.cuda.live)
    logits = set()
    for _ in range(1000):
        if cache.lengths[0] == SPEC.capacity:
            cache.rewind([3, 3])
        logits.add(machine.session.decode(column(6, 7), cache).ctypes.data)
    made = set(machine.cuda.names()[before:])
    launch = {"cudaGraphLaunch"} if cuda_graph else {"cudaMemcpyAsync", "enqueue"}
    assert made == {"cudaSetDevice", "cudaStreamSynchronize"} | launch
    assert machine.cuda.live == live
    assert [buffer.address for buffer in cache.buffers] == where
    assert len(logits) == 1


def test_the_step_is_recorded_once_after_a_plain_run_and_then_replayed(machine: Machine) -> None:
    cache = machine.session.new_cache(1)
    machine.session.prefill(column(4), np.array([1]), cache)
    watched = {"enqueue", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch"}
    seen = [
        [
            event[0]
            for event in machine.events_of(lambda: machine.session.decode(column(4), cache))
            if event[0] in watched
        ]
        for _ in range(4)
    ]
    recorded = ["cudaStreamBeginCapture", "enqueue", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphLaunch"]
    assert seen == [["enqueue"], recorded, ["cudaGraphLaunch"], ["cudaGraphLaunch"]]
    assert list(machine.cuda.live.values()).count("exec") == 1
    assert "graph" not in machine.cuda.live.values()


def test_another_cache_is_bound_anew_and_its_step_recorded_anew(machine: Machine) -> None:
    """A recorded step holds the addresses of its cache: replayed for another one it would write into the first."""
    first, second = machine.session.new_cache(1), machine.session.new_cache(1)
    for cache, token in ((first, 4), (second, 9)):
        machine.session.prefill(column(token), np.array([1]), cache)
        for _ in range(3):
            machine.session.decode(column(token), cache)
    found = machine.session.decode(column(4), first)
    assert found[0, 0].tolist() == logits_of([4] * 5).tolist()
    assert machine.session.decode(column(9), second)[0, 0].tolist() == logits_of([9] * 5).tolist()
    assert list(machine.cuda.live.values()).count("exec") <= 1
    both = machine.session.new_cache(2)
    machine.session.prefill(column(4, 9), np.array([1, 1]), both)
    assert machine.session.decode(column(1, 2), both)[1, 0].tolist() == logits_of([9, 2]).tolist()


def test_without_the_switch_nothing_is_recorded(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cuda_graph=False)
    generated(machine.session, [[4, 5]])
    assert not {"cudaStreamBeginCapture", "cudaGraphLaunch"} & set(machine.cuda.names())


def stepped(machine: Machine) -> Any:
    """A cache whose next step will be recorded."""
    cache = machine.session.new_cache(1)
    machine.session.prefill(column(4), np.array([1]), cache)
    machine.session.decode(column(4), cache)
    return cache


def test_a_step_that_cannot_be_recorded_says_how_to_go_without(machine: Machine) -> None:
    """It is not quietly run the slow way."""
    cache = stepped(machine)
    machine.trt.capturable = False
    with pytest.raises(BackendError, match=r"cannot be recorded as a CUDA graph, run it without \(cuda_graph=False\)"):
        machine.session.decode(column(4), cache)
    machine.trt.capturable = True
    machine.trt.says = "this layer waits for the host"
    with pytest.raises(BackendError, match="waits for the host; it was being recorded"):
        machine.session.decode(column(4), cache)
    machine.trt.says = ""
    machine.cuda.fail["cudaMemcpyAsync"] = [0, NO_CAPTURE]
    with pytest.raises(BackendError, match=r"cudaErrorStreamCaptureUnsupported.*cuda_graph=False"):
        machine.session.decode(column(4), cache)
    assert cache.lengths.tolist() == [2]
    assert machine.session.decode(column(4), cache)[0, 0].tolist() == logits_of([4, 4, 4]).tolist()


def test_a_run_that_fails_gives_tensorrts_own_words(machine: Machine) -> None:
    cache = machine.session.new_cache(1)
    machine.trt.says = "IExecutionContext::enqueueV3: Error Code 3"
    with pytest.raises(BackendError, match=r"the TensorRT prefill engine could not be run: .*Error Code 3"):
        machine.session.prefill(column(4), np.array([1]), cache)
    assert cache.lengths.tolist() == [0]


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cudaStreamSynchronize", ILLEGAL_ADDRESS, "cudaErrorIllegalAddress, an illegal memory access.*start it again"),
        ("cudaMemcpyAsync", ILLEGAL_ADDRESS, "cudaMemcpyAsync failed on GPU 0"),
        ("cudaGraphInstantiate", NO_MEMORY, "no room for a request .cudaGraphInstantiate"),
    ],
)
def test_every_return_code_is_read(machine: Machine, call: str, code: int, text: str) -> None:
    cache = stepped(machine)
    machine.cuda.fail[call] = [code]
    with pytest.raises(BackendError, match=text):
        machine.session.decode(column(4), cache)


def test_a_cache_that_does_not_fit_says_what_to_do(machine: Machine) -> None:
    machine.cuda.fail["cudaMalloc"] = [NO_MEMORY]
    with pytest.raises(BackendError, match=r"no room for a request of 0 MB .*smaller batch.*--max-seq-len"):
        machine.session.new_cache(1)
    generated(machine.session, [[4, 5]])  # the refusal is not held against what comes next


@pytest.mark.parametrize(
    ("call", "successes"), [*(("cudaMalloc", n) for n in range(3)), *(("cudaMallocHost", n) for n in range(2))]
)
def test_an_engine_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, call: str, successes: int) -> None:
    machine = Machine(tmp_path)
    cuda = FakeCuda()
    cuda.fail[call] = [0] * successes + [NO_MEMORY]
    with pytest.raises(BackendError, match="no room"):
        TensorRTExecutor(FakeTensorRT(cuda, compute), Cuda(cuda, 0), machine.plans, SPEC, VOCAB)
    assert cuda.live == {}


def test_closing_gives_everything_back(machine: Machine) -> None:
    kept = machine.session.new_cache(1)
    with machine.session:
        generated(machine.session, [[4, 5], [6]])
        machine.session.prefill(column(4), np.array([1]), kept, "all")
        machine.session.decode(np.full((1, 4), 4), kept)
    gc.collect()
    assert machine.cuda.live == {}
    machine.session.close()
    with pytest.raises(BackendError, match="closed: open the bundle again"):
        machine.session.decode(column(4), kept)
    with pytest.raises(BackendError, match="closed"):
        machine.session.new_cache(1)


def test_a_cache_that_nothing_holds_is_given_back(machine: Machine) -> None:
    """Its buffers are one allocation."""
    before = list(machine.cuda.live)
    cache = machine.session.new_cache(2)
    assert len(machine.cuda.live) == len(before) + 1
    del cache
    gc.collect()
    assert list(machine.cuda.live) == before


def test_logits_that_are_held_outlive_the_engine(machine: Machine) -> None:
    cache = machine.session.new_cache(1)
    logits = machine.session.prefill(column(4), np.array([1]), cache)
    machine.session.close()
    assert list(machine.cuda.live.values()) == ["host"]
    assert logits[0].tolist() == logits_of([4]).tolist()
    del logits
    gc.collect()
    assert machine.cuda.live == {}


BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"aliased": False}, r"present\.0\.key is not written in place of past_key_values\.0\.key"),
    ({"tensors": {"present.1.value": None}}, r"it has no present\.1\.value"),
    ({"tensors": {"attention_mask": ["INPUT", "INT64", [-1, -1]]}}, "it has attention_mask"),
    (
        {"tensors": {"logits": ["OUTPUT", "HALF", [-1, 1, VOCAB]]}},
        r"logits is float16 .*expected float32 \(\.\.\., 32\)",
    ),
    (
        {"tensors": {"past_key_values.0.key": ["INPUT", "HALF", [-1, 2, 32, 16]]}},
        r"expected float16 \(\.\.\., 2, 24, 16\)",
    ),
    ({"host": ["write_indices"]}, "write_indices is wanted on the host"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_PLANS)
def test_an_engine_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BundleError, match=text):
        Machine(tmp_path, **changes)


def test_a_plan_that_does_not_load_gives_tensorrts_own_words(machine: Machine) -> None:
    machine.plans["decode"].write_bytes(b"ftrt")
    machine.trt.says = "The engine plan file is not compatible with this version of TensorRT"
    with pytest.raises(BackendError, match=r"cannot load .*decode\.plan on this GPU: The engine plan file is not"):
        TensorRTExecutor(machine.trt, Cuda(machine.cuda, 0), machine.plans, SPEC, VOCAB)


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    cuda = FakeCuda(devices=2, capability=(12, 0))
    assert Cuda(cuda, 1).compute_capability == "sm120"
    with pytest.raises(BackendError, match="GPU 2 was asked for, and this machine has GPU 0 to 1"):
        Cuda(cuda, 2)
    with pytest.raises(BackendError, match="GPU 1 was asked for, and this machine has GPU 0 alone"):
        Cuda(FakeCuda(), 1)
    cuda.fail["cudaGetDeviceCount"] = [NO_DEVICE]
    with pytest.raises(BackendError, match=r"no NVIDIA GPU can be used here .cudaErrorNoDevice.*nvidia-smi"):
        Cuda(cuda, 0)


def test_cuda_bindings_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("adx.runtime.cuda.importlib.import_module", missing)
    with pytest.raises(BackendError, match="pip install cuda-bindings"):
        Cuda.open()


def test_an_array_keeps_the_memory_that_it_lies_on() -> None:
    fake = FakeCuda()
    memory = PinnedMemory(Cuda(fake, 0), 64)
    array = memory.array(np.int64, (2, 3), 8)[1:]
    assert array.ctypes.data == memory.address + 8 + 24
    del memory
    assert list(fake.live.values()) == ["host"]
    del array
    assert fake.live == {}


def test_the_fake_tensorrt_has_the_names_of_the_real_one(tmp_path: Path) -> None:
    """TensorRT for RTX is real but for a GPU: what the fake answers to must be there, and errors must be heard."""
    try:
        library = load_library("tensorrt-rtx")
    except BackendError as error:
        pytest.skip(str(error))
    trt = library.module
    for fake, real in ((FakeEngine, trt.ICudaEngine), (FakeContext, trt.IExecutionContext)):
        assert [name for name in vars(fake) if not name.startswith("_") and not hasattr(real, name)] == []
    assert hasattr(trt.ICudaEngine, "num_io_tensors")
    assert hasattr(trt.ICudaEngine, "num_optimization_profiles")
    assert hasattr(trt.Runtime, "engine_host_code_allowed")
    for enum in ("TensorIOMode", "DataType", "TensorLocation", "ExecutionContextAllocationStrategy"):
        assert set(vars(getattr(FakeTensorRT, enum))) <= set(getattr(trt, enum).__members__)
    plan = tmp_path / "prefill.plan"
    plan.write_bytes(b"no plan" * 100)
    with pytest.raises(BackendError, match=r"cannot load .*prefill\.plan on this GPU: (?!it gave no reason)\S+"):
        TensorRTExecutor(library, Cuda(FakeCuda(), 0), {"prefill": plan}, SPEC, VOCAB)


def test_the_fake_cuda_has_the_names_of_the_real_one() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    calls = {f"cuda{name[1:]}" for name in vars(FakeCuda) if name.startswith("_") and name[1:2].isupper()}
    assert [name for name in sorted(calls) if not hasattr(runtime, name)] == []
    for name in ("cudaMemcpyKind", "cudaDeviceAttr"):
        for value, number in vars(getattr(FakeCuda, name)).items():
            assert int(getattr(getattr(runtime, name), value)) == number
    assert runtime.cudaStreamNonBlocking == FakeCuda.cudaStreamNonBlocking
    for code, texts in TEXTS.items():
        error = runtime.cudaError_t(code)
        assert (runtime.cudaGetErrorName(error)[1].decode(), runtime.cudaGetErrorString(error)[1].decode()) == texts
