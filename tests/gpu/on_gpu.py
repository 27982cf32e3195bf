"""The checks of every backend as test classes; a backend's own file names the backend."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import gpu_checks
import pytest
from gpu_models import FLOATS, INT8, PACKAGE, SMOLLM2, built

from adx.cli.main import main
from adx.export.bundle import Bundle
from adx.export.errors import BackendError
from adx.runtime import static_openers
from adx.runtime.static_session import StaticSession

PLAIN = "llama-fp16"


class Checks:
    """What holds of every backend."""

    backend: ClassVar[str]

    @pytest.mark.parametrize("name", FLOATS)
    def test_parity(self, name: str, backend: str, store: Path, opened: Any) -> None:
        found = built(store, name, backend)
        gpu_checks.check_parity(opened(found.bundle), Bundle.open(found.bundle), found.checkpoint)

    @pytest.mark.parametrize("name", FLOATS)
    def test_greedy_tokens_are_those_of_the_graphs(self, name: str, backend: str, store: Path, opened: Any) -> None:
        bundle = built(store, name, backend).bundle
        gpu_checks.check_greedy(opened(bundle), opened(bundle, "onnx"))

    @pytest.mark.parametrize("name", ["llama-fp16", "gemma2-fp16"])
    def test_the_cache_is_written_in_place(self, name: str, backend: str, store: Path, opened: Any) -> None:
        gpu_checks.check_cache_in_place(opened(built(store, name, backend).bundle))

    @pytest.mark.parametrize("name", ["llama-fp16", "phi3-fp16-chunks"])
    def test_the_smallest_and_the_largest_call(self, name: str, backend: str, store: Path, opened: Any) -> None:
        gpu_checks.check_limits(opened(built(store, name, backend).bundle))

    def test_smollm2(self, backend: str, store: Path, opened: Any) -> None:
        found = built(store, SMOLLM2, backend)
        gpu_checks.check_parity(opened(found.bundle), Bundle.open(found.bundle), found.checkpoint)

    def test_latency(
        self, backend: str, store: Path, opened: Any, record_property: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Shown, never judged."""
        real = importlib.util.find_spec(PACKAGE) is not None
        said = gpu_checks.latency(opened(built(store, SMOLLM2 if real else PLAIN, backend).bundle))
        said = f"{'SmolLM2-135M' if real else 'a tiny model'}: {said}"
        record_property("latency", said)
        with capsys.disabled():
            print(f"\n{backend}: {said}")


class CommandChecks:
    """What holds of every backend that is a target of the commands."""

    backend: ClassVar[str]

    def test_the_commands_run_it(
        self, backend: str, store: Path, opened: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = built(store, PLAIN, backend)
        capsys.readouterr()
        target = ["--target", backend, "--json"]
        args = ["generate", str(found.bundle), "--prompt", "a", "-n", "8", "--temperature", "0", "--ignore-eos"]
        assert main([*args, *target]) == 0
        assert json.loads(capsys.readouterr().out)["completion_tokens"] == 8
        assert main(["bench", str(found.bundle), "--prompt-len", "16", "--new-tokens", "8", *target]) == 0
        assert json.loads(capsys.readouterr().out)["provider"] == opened(found.bundle).provider
        assert main(["verify", str(found.bundle), "--reference", str(found.checkpoint), *target]) == 0
        assert json.loads(capsys.readouterr().out)["passed"] is True


class PlanChecks(Checks, CommandChecks):
    """What holds of plans."""

    @pytest.mark.parametrize("name", INT8)
    def test_parity_in_8_bits(self, name: str, backend: str, store: Path, opened: Any) -> None:
        found = built(store, name, backend)
        gpu_checks.check_parity(opened(found.bundle), Bundle.open(found.bundle), found.checkpoint)

    @pytest.mark.parametrize("name", ["llama-fp16", "phi3-fp16-chunks"])
    def test_the_shapes_of_each_profile(self, name: str, backend: str, store: Path, opened: Any) -> None:
        gpu_checks.check_profiles(opened(built(store, name, backend).bundle))

    @pytest.mark.parametrize("name", ["llama-fp16", "llama-int8"])
    def test_with_and_without_a_cuda_graph(
        self, name: str, backend: str, store: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle = built(store, name, backend).bundle
        gpu_checks.check_cuda_graph(opened(bundle), opened(bundle, cuda_graph=False), monkeypatch)

    def test_plans_of_another_gpu_are_refused(self, backend: str, store: Path, opened: Any) -> None:
        """The same plans, said to be for another compute capability: by the bundle, then by their records alone."""
        whole = Bundle.open(built(store, PLAIN, backend).bundle)
        engines = [
            dataclasses.replace(engine, compute_capability="sm75") if engine.target == backend else engine
            for engine in whole.manifest.engines
        ]
        other = Bundle(whole.path, dataclasses.replace(whole.manifest, engines=tuple(engines)))
        open_plans = {"tensorrt": static_openers.open_tensorrt, "tensorrt-rtx": static_openers.open_tensorrt_rtx}
        with pytest.raises(BackendError, match=r"engines were built for sm75, and the GPU here is sm\d+: build one"):
            open_plans[backend](other, None)


class OrtChecks(Checks):
    """What holds of ONNX Runtime's providers."""

    provider: ClassVar[str]

    def test_the_provider_computes(self, backend: str, store: Path, opened: Any) -> None:
        session: StaticSession = opened(built(store, PLAIN, backend).bundle)
        assert session.provider == self.provider
        for one in session._executor.sessions.values():
            assert one.get_providers()[0] == self.provider
