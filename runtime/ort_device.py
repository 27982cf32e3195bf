"""`Executor` on a device through ONNX Runtime: its CUDA provider or its TensorRT provider, and never the CPU instead.

ONNX Runtime falls back by itself: a provider whose libraries do not load is replaced by the CPU with a line in a log, a
node without a kernel on the device runs on the CPU. Both are errors here. Its own switch against the second,
`session.disable_cpu_ep_fallback`, refuses every graph that computes with shapes, since ONNX Runtime places those few
nodes on the CPU on purpose; so the placement of each node is read and checked instead.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adx.engines.profiles import CACHE, ShapeProfile, in_words
from adx.export.errors import BackendError, BundleError
from adx.export.spec import INPUT_IDS, LOGITS, KVCacheSpec, Phase
from adx.runtime.cache import KVCache
from adx.runtime.ort_graphs import cache_names
from adx.runtime.session import Logits

if TYPE_CHECKING:
    import onnxruntime

CPU = "CPUExecutionProvider"
# What arithmetic on shapes is made of: a handful of integers, which belong on the host. Nothing else may run there.
SHAPE_OPERATORS = frozenset(
    (
        "Add",
        "Cast",
        "Concat",
        "Constant",
        "Div",
        "Equal",
        "Expand",
        "Gather",
        "Max",
        "Min",
        "Mul",
        "Range",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
        "Where",
    )
)


@dataclass(frozen=True)
class DeviceProvider:
    """An execution provider of ONNX Runtime and how to start it.

    Attributes:
        name: as ONNX Runtime names it.
        memory: where its tensors lie, as ONNX Runtime names that.
        install: what brings it.
        options: of the provider, per phase.
        fixed_dims: named dimensions that the provider needs fixed.
    """

    name: str
    memory: str
    install: str
    options: Mapping[Phase, Mapping[str, str]] = field(default_factory=dict)
    fixed_dims: Mapping[str, int] = field(default_factory=dict)


def cuda_provider() -> DeviceProvider:
    """ONNX Runtime's CUDA provider."""
    install = "`pip uninstall onnxruntime` and then `pip install 'adx-toolchain[gpu]'`"
    return DeviceProvider("CUDAExecutionProvider", "cuda", install)


def tensorrt_provider(
    profiles: Mapping[Phase, Sequence[ShapeProfile]], places: int, cache_folder: Path | None
) -> DeviceProvider:
    """ONNX Runtime's TensorRT provider; it compiles the graphs when they are loaded.

    Args:
        profiles: the shapes of each phase; its widest profile, the last one, is what the provider compiles for.
        places: places of a row in the cache, which TensorRT needs fixed.
        cache_folder: where it keeps what it compiled, or None: every start compiles again.
    """
    kept = (
        {}
        if cache_folder is None
        else {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(cache_folder),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(cache_folder),
        }
    )
    # The graphs are float16 where they may be; TensorRT 10 refuses such tensors unless float16 is switched on.
    fixed = {"trt_fp16_enable": "1", "trt_layer_norm_fp32_fallback": "1"}
    options = {phase: {**fixed, **kept, **_profile_options(of[-1])} for phase, of in profiles.items()}
    install = "`pip uninstall onnxruntime`, then `pip install 'adx-toolchain[gpu]' 'tensorrt>=10.14,<11'`"
    return DeviceProvider("TensorrtExecutionProvider", "cuda", install, options, {CACHE: places})


class OrtDevice:
    """The prefill and the decode graph in ONNX Runtime sessions on a device; implements `Executor`."""

    def __init__(
        self,
        graphs: Mapping[Phase, Path],
        kv_cache: KVCacheSpec,
        vocab_size: int,
        provider: DeviceProvider,
        *,
        device: int = 0,
    ) -> None:
        """Load both graphs.

        Args:
            graphs: the graph of each phase; the weights lie beside them.
            kv_cache: shape of the cache.
            vocab_size: width of the logits.
            provider: what is to compute; nothing else will.
            device: index of the device.

        Raises:
            BackendError: ONNX Runtime or the provider is missing or does not start, or a node has no kernel there.
            BundleError: ONNX Runtime cannot load a graph.
        """
        self.threads = 1
        self.provider = provider.name
        self.kv_cache = kv_cache
        self.vocab_size = vocab_size
        self.memory, self.device = provider.memory, device
        said = check_provider(provider)
        self.sessions: dict[Phase, onnxruntime.InferenceSession] = {
            phase: _load(path, provider, phase, device, said) for phase, path in graphs.items()
        }

    def new_buffers(self, batch_size: int, places: int) -> Sequence[onnxruntime.OrtValue]:
        """See `Executor.new_buffers`."""
        shape = (batch_size, self.kv_cache.kv_heads, places, self.kv_cache.head_dim)
        zeros = np.zeros(shape, np.float16)
        return [self.value(zeros) for _ in range(2 * self.kv_cache.layers)]

    def run(self, phase: Phase, inputs: Mapping[str, NDArray[np.int64]], cache: KVCache) -> Logits:
        """See `Executor.run`."""
        batch, length = inputs[INPUT_IDS].shape
        if phase == "decode" and length == 1:
            return self._kept_step(cache).run(inputs)
        return _Step.bind(self, phase, (batch, length), cache).run(inputs)

    def close(self) -> None:
        """See `Executor.close`; a cache's memory goes with the cache."""
        self.sessions.clear()

    def value(self, array: NDArray[Any]) -> onnxruntime.OrtValue:
        """A copy of an array on the device, in memory of its own (`ortvalue_from_numpy` shares it on the host)."""
        import onnxruntime

        made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, self.memory, self.device)
        made.update_inplace(array)
        return made

    def _kept_step(self, cache: KVCache) -> _Step:
        """The binding for one new token a row, made once for a cache."""
        step = cache.bound.get(self.provider)
        if not isinstance(step, _Step) or step.owner is not self:
            step = cache.bound[self.provider] = _Step.bind(self, "decode", (cache.batch_size, 1), cache)
        return step


@dataclass(frozen=True)
class _Step:
    """A graph's inputs and outputs bound to memory that stays: integers and cache on the device, logits on the host."""

    owner: OrtDevice
    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    inputs: Mapping[str, onnxruntime.OrtValue]
    logits: NDArray[np.float32]

    @staticmethod
    def bind(owner: OrtDevice, phase: Phase, shape: tuple[int, int], cache: KVCache) -> _Step:
        """Bind a cache's buffers, both as past and as present, and new memory for `shape` tokens."""
        batch, length = shape
        session = owner.sessions[phase]
        binding = session.io_binding()
        cached = cache_names(owner.kv_cache)
        names = [i.name for i in session.get_inputs() if i.name not in cached]
        inputs = {name: owner.value(np.zeros(shape if name == INPUT_IDS else batch, np.int64)) for name in names}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for buffer, (past, present) in zip(cache.buffers, cached.items(), strict=True):
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        logits = np.empty((batch, 1 if phase == "prefill" else length, owner.vocab_size), np.float32)
        binding.bind_output(LOGITS, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        return _Step(owner, session, binding, inputs, logits)

    def run(self, values: Mapping[str, NDArray[np.int64]]) -> Logits:
        """Compute: the logits, in the step's own buffer."""
        for name, value in self.inputs.items():
            value.update_inplace(np.ascontiguousarray(values[name]))
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
            raise BackendError(
                f"{self.owner.provider} failed: {str(error).splitlines()[0]}; where it names memory, use a smaller "
                "batch or a smaller --max-seq-len"
            ) from error
        return self.logits


def check_provider(provider: DeviceProvider) -> str:
    """Refuse a provider that is not installed, and load the libraries that it needs.

    Returns:
        What ONNX Runtime said of libraries that it could not find.

    Raises:
        BackendError: ONNX Runtime or the provider is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"ONNX Runtime is not installed: {provider.install} brings it") from error
    there = onnxruntime.get_available_providers()
    if provider.name not in there:
        raise BackendError(
            f"{provider.name} was asked for, and ONNX Runtime {onnxruntime.__version__} here has {', '.join(there)}: "
            f"{provider.install} bring it"
        )
    said = io.StringIO()
    if provider.memory == "cuda":  # from the packages nvidia-*; what it cannot find, it prints
        with contextlib.redirect_stdout(said):
            onnxruntime.preload_dlls()
    return " ".join(said.getvalue().split())


def _load(path: Path, provider: DeviceProvider, phase: Phase, device: int, said: str) -> onnxruntime.InferenceSession:
    """One graph in a session, every node of which is where it shall be."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, size in provider.fixed_dims.items():
        options.add_free_dimension_override_by_name(name, size)
    settings = dict(provider.options.get(phase, {}))
    if provider.name != CPU:
        settings["device_id"] = str(device)
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=[(provider.name, settings)], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime's exceptions have no common base below Exception
        reason = str(error).splitlines()[0]
        kind = BundleError if type(error).__name__ in ("NoSuchFile", "InvalidProtobuf") else BackendError
        raise kind(f"ONNX Runtime cannot load {path} on {provider.name}, device {device}: {reason}") from error
    session.disable_fallback()
    check_placement(session, provider, said)
    return session


def check_placement(session: Any, provider: DeviceProvider, said: str = "") -> None:
    """Refuse a session that does not compute where it was asked to.

    Args:
        session: with its placement recorded.
        said: what was heard of missing libraries, for the message.

    Raises:
        BackendError: the provider did not start, or nodes other than arithmetic on shapes are on the CPU.
    """
    found = list(session.get_providers())
    if found[:1] != [provider.name]:
        raise BackendError(
            f"{provider.name} was asked for and is installed, but does not start here, and {' and '.join(found)} "
            f"would compute instead: {said or 'a library of CUDA or cuDNN, or the GPU itself, is missing'}; "
            "`nvidia-smi` shows the GPU, `adx doctor` what is installed"
        )
    astray = [
        f"{node.op_type} ({node.name})"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider.name
        for node in part.get_nodes()
        if node.op_type not in SHAPE_OPERATORS
    ]
    if astray:
        more = f" and {len(astray) - 3} more" if len(astray) > 3 else ""
        raise BackendError(
            f"{provider.name} has no kernel for {', '.join(astray[:3])}{more}, and the CPU would compute them: a newer "
            "ONNX Runtime may have them"
        )


def _profile_options(profile: ShapeProfile) -> dict[str, str]:
    """A profile in the provider's spelling: `input_ids:1x1,write_indices:1`."""
    return {
        f"trt_profile_{corner}_shapes": ",".join(
            f"{name}:{in_words(shapes[index])}" for name, shapes in profile.shapes.items()
        )
        for index, corner in enumerate(("min", "opt", "max"))
    }
