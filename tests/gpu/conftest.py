"""Fixtures of the checks on a GPU, which are skipped, with the reason, where a backend cannot run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from adx.ci.gpu_check import obstacle
from adx.engines.devices import gpus
from adx.export.bundle import Bundle
from adx.runtime import static_openers
from adx.runtime.static_session import StaticSession

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("gpu_checks", "on_gpu")

OPENERS: dict[str, Callable[..., StaticSession]] = {
    "tensorrt": static_openers.open_tensorrt,
    "tensorrt-rtx": static_openers.open_tensorrt_rtx,
    "ort-cuda": static_openers.open_ort_cuda,
    "ort-tensorrt": static_openers.open_ort_tensorrt,
    "onnx": static_openers.open_onnx,  # the graphs on the CPU, to compare with
}
Open = Callable[..., StaticSession]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where bundles are kept for the next backend; heard only where this folder is named on the command line."""
    parser.addoption("--bundles", type=Path, help="folder of the bundles that the GPU checks make and use")


@pytest.fixture(scope="session")
def store(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where bundles are made."""
    folder: Path = pytestconfig.getoption("--bundles", None) or tmp_path_factory.mktemp("bundles")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="class")
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of the class; everything in it is skipped where that cannot run."""
    name: str = request.cls.backend
    reason = obstacle(name, gpus())
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.fixture
def opened(backend: str, store: Path) -> Iterator[Open]:
    """Opens a bundle's session, on the class's backend or another; all are closed at the end."""
    with ExitStack() as stack:

        def opener(bundle: Path, other: str | None = None, **settings: Any) -> StaticSession:
            name = other or backend
            if name == "ort-tensorrt":  # it compiles when it loads: once a bundle
                settings["cache_folder"] = store / f"{bundle.name}-{name}"
                settings["cache_folder"].mkdir(exist_ok=True)
            return stack.enter_context(OPENERS[name](Bundle.open(bundle), None, **settings))

        yield opener
