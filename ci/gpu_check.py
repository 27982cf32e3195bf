"""Does adx run on this machine's GPU? Runs tests/gpu, one backend after the other, and says yes or no for each.

A backend runs in a process of its own, since an error on a GPU can leave a process unable to use it. `ci/gpu-check` is
the command; it gives the checkout that it lies in.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from adx.engines.devices import Gpu, gpus
from adx.engines.tensorrt_library import INSTALL, Target, capabilities, load_library
from adx.export.errors import BackendError

ROOT = Path(__file__).parents[1]
TESTS = Path("tests/gpu")
NO_GPU = "no CUDA device or driver was found"
# Each backend's file in `TESTS`.
BACKENDS: Mapping[str, str] = {
    "tensorrt": "test_tensorrt.py",
    "tensorrt-rtx": "test_tensorrt_rtx.py",
    "ort-cuda": "test_ort_cuda.py",
    "ort-tensorrt": "test_ort_tensorrt.py",
}
PLANS: tuple[Target, ...] = ("tensorrt", "tensorrt-rtx")
TOOLS = ("pytest", "torch", "transformers", "onnxruntime")  # that the checks need, whatever the backend
LIBRARIES = (
    "adx-toolchain",
    "torch",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-rtx",
    "tensorrt-rtx-cu13-bindings",
    "onnxruntime-ep-nv-tensorrt-rtx-cu13",
    "cuda-bindings",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_MODULES = {"tensorrt": (("tensorrt",),), "tensorrt-rtx": (("tensorrt_rtx",), ("tensorrt_rtx_bindings",))}
_PROVIDERS = {"ort-cuda": "CUDAExecutionProvider", "ort-tensorrt": "TensorrtExecutionProvider"}
_ORT_GPU = "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
_INSTALL = "pip install -c constraints.txt -e '.[{}]' pytest"  # in the checkout; the extra that fits ONNX Runtime
_DEFAULT_SECONDS = 600.0
_TIME = "raise --timeout, or check one --backend at a time"

State = Literal["yes", "no", "not checked"]
EXIT_CODES: Mapping[State, int] = {"yes": 0, "no": 1, "not checked": BackendError.exit_code}


@dataclass(frozen=True)
class Verdict:
    """What was found of one backend.

    Attributes:
        reason: why not, or why it was not checked; empty for yes.
        latency: medians in words, or None where none was measured.
    """

    backend: str
    state: State
    reason: str = ""
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0
    seconds: float = 0.0
    latency: str | None = None

    def line(self) -> str:
        """For people."""
        counts = f"{self.passed} checks passed" + (f", {len(self.failed)} failed" if self.failed else "")
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        ran = f"{counts}{skipped} in {self.seconds:.0f} s" if self.seconds else ""
        said = "; ".join(part for part in (self.latency, ran, self.reason) if part)
        return f"{self.backend:<14}{self.state:<13}{said}"


Run = Callable[[str, Path, float], Verdict]


def obstacle(backend: str, devices: Sequence[Gpu]) -> str | None:
    """What keeps a backend from being checked here, and what to install; None where it can be run.

    A library that is there and does not load is no obstacle: its checks fail, and say so.
    """
    missing = [] if devices else [NO_GPU]
    missing += _missing_library(backend)
    if not missing and backend == "tensorrt-rtx" and (other := _other_capability(devices[0].capability)):
        missing.append(other)
    return "; ".join(missing) or None


def check(backends: Sequence[str], devices: Sequence[Gpu], run: Run, seconds: float) -> tuple[Verdict, ...]:
    """Check backends one after the other, within `seconds` in all.

    Args:
        run: runs one backend's checks, given a folder that all share and the seconds that are left.
    """
    end = time.monotonic() + seconds
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="adx-gpu-check-") as folder:
        for backend in backends:
            if (reason := obstacle(backend, devices)) is not None:
                verdicts.append(Verdict(backend, "not checked", reason))
            elif (left := end - time.monotonic()) <= 0:
                verdicts.append(Verdict(backend, "no", f"no time was left of {seconds:.0f} s: {_TIME}"))
            else:
                print(f"checking {backend}", file=sys.stderr, flush=True)
                verdicts.append(run(backend, Path(folder), left))
    return tuple(verdicts)


def overall(verdicts: Sequence[Verdict]) -> State:
    """No if any backend failed, else yes if any passed."""
    states: set[State] = {verdict.state for verdict in verdicts}
    return "no" if "no" in states else "yes" if "yes" in states else "not checked"


def run_tests(checkout: Path, backend: str, folder: Path, seconds: float) -> Verdict:
    """Run one backend's tests of a checkout in a process of their own; what pytest says goes to stderr."""
    report = folder / f"{backend}.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--bundles={folder / 'bundles'}"]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / BACKENDS[backend])]
    started = time.monotonic()
    with subprocess.Popen(command, cwd=checkout, stdout=sys.stderr, start_new_session=True) as process:
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # its group: a build may have started processes of its own
                os.killpg(process.pid, signal.SIGKILL)
    spent = time.monotonic() - started
    if code is None:
        return Verdict(backend, "no", f"not done after {spent:.0f} s: {_TIME}", seconds=spent)
    return read_report(backend, report, code, spent)


def read_report(backend: str, report: Path, code: int, seconds: float) -> Verdict:
    """The verdict out of pytest's JUnit report and exit code."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Verdict(backend, "no", f"the checks ended with code {code} before their report", seconds=seconds)
    failed = {case: node for case in cases for node in case if node.tag in ("failure", "error")}
    skipped = {case: node for case in cases for node in case if node.tag == "skipped"}
    passed = len(cases) - len(failed) - len(skipped)
    values = (node.get("value") for node in ElementTree.parse(report).iter("property") if node.get("name") == "latency")
    reasons = [f"{case.get('name')}: {_first_line(node)}" for case, node in failed.items()]
    if failed or code not in (0, 5) or (passed and code):  # 5: nothing was collected
        state: State = "no"
        reasons = reasons or [f"pytest ended with code {code}"]
    elif passed:
        state = "yes"
    else:
        state, reasons = "not checked", [_first_line(node) for node in list(skipped.values())[:1]]
    names = tuple(str(case.get("name")) for case in failed)
    return Verdict(backend, state, next(iter(reasons), ""), passed, names, len(skipped), seconds, next(values, None))


def describe_machine(devices: Sequence[Gpu], checkout: Path) -> dict[str, str]:
    """The machine in words: system, GPUs, driver, libraries, and which adx is checked."""
    found = [f"{name} {version}" for name in LIBRARIES if (version := _version(name))]
    return {
        "system": f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "gpu": ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in devices) or f"none: {NO_GPU}",
        "driver": _driver() or "none found",
        "libraries": ", ".join(found),
        "adx": str(ROOT) + ("" if ROOT.samefile(checkout) else f", not the checkout {checkout}: {_install()}"),
    }


def main(args: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        0: every backend that can run here does; 1: one does not; 5: there is nothing to check on.
    """
    chosen = _parser().parse_args(args)
    backends = tuple(dict.fromkeys(chosen.backend or BACKENDS))
    devices = gpus()
    checkout: Path = chosen.checkout
    facts = describe_machine(devices, checkout)
    if not chosen.json:
        print(*(f"{name:<14}{value}" for name, value in facts.items()), sep="\n", flush=True)
    if lacking := _lacking_tools(checkout):
        reason = lacking if devices else f"{NO_GPU}; {lacking}"
        verdicts: tuple[Verdict, ...] = tuple(Verdict(backend, "not checked", reason) for backend in backends)
    else:
        verdicts = check(backends, devices, functools.partial(run_tests, checkout), chosen.timeout)
    state = overall(verdicts)
    if chosen.json:
        listed = [dataclasses.asdict(verdict) for verdict in verdicts]
        print(json.dumps({"verdict": state, "machine": facts, "backends": listed}, indent=2))
    else:
        print(*(verdict.line() for verdict in verdicts), _last_line(state), sep="\n")
    return EXIT_CODES[state]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ci/gpu-check",
        description="Check on this machine's GPU what adx builds for it: parity with PyTorch, limits, latency.",
        epilog="Exit code: 0 yes, 1 no, 5 nothing to check on.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--backend", action="append", choices=BACKENDS, help="check this backend; repeatable; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument(
        "--timeout", type=_seconds, default=_DEFAULT_SECONDS, metavar="SECONDS", help="in all (default: 600)"
    )
    parser.add_argument(
        "--checkout", type=_folder, default=ROOT, metavar="DIR", help=f"whose {TESTS} to run (default: this one)"
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _folder(text: str) -> Path:
    path = Path(os.path.realpath(text))
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def _last_line(state: State) -> str:
    words = {
        "yes": "yes: every backend that can run here passed",
        "no": "no: a backend that should run here does not",
        "not checked": "nothing to check on: the lines above say what is missing",
    }
    return f"{'overall':<14}{words[state]}"


def _install() -> str:
    """The command that brings what the checks need; ONNX Runtime's two packages exclude each other."""
    return _INSTALL.format("gpu" if _version("onnxruntime-gpu") else "cpu")


def _lacking_tools(checkout: Path) -> str | None:
    """What the checks themselves need and do not find, with the command that brings it."""
    if not (checkout / TESTS).is_dir():
        return f"{checkout} has no {TESTS}: run ci/gpu-check of a checkout, after {_install()} there"
    lacking = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return f"{', '.join(lacking)} not installed: {_install()}"


def _missing_library(backend: str) -> list[str]:
    missing = []
    if backend in PLANS:
        target: Target = "tensorrt" if backend == "tensorrt" else "tensorrt-rtx"
        if not any(all(map(_is_installed, names)) for names in _MODULES[target]):
            missing.append(f"{target} is not installed: {INSTALL[target]}")
        if not _is_installed("cuda.bindings"):
            missing.append("cuda-bindings is not installed: pip install cuda-bindings")
        return missing
    import onnxruntime

    if _PROVIDERS[backend] not in onnxruntime.get_available_providers():
        missing.append(f"ONNX Runtime {onnxruntime.__version__} here has no {_PROVIDERS[backend]}: {_ORT_GPU}")
    if backend == "ort-tensorrt" and not _is_installed("tensorrt") and ctypes.util.find_library("nvinfer") is None:
        missing.append("TensorRT is not installed: pip install 'tensorrt>=10.14,<11'")
    return missing


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _other_capability(capability: str) -> str | None:
    try:
        library = load_library("tensorrt-rtx")
    except BackendError:
        return None
    accepted = capabilities(library) or (capability,)
    return None if capability in accepted else f"{library.name} is for {', '.join(accepted)}, not for {capability}"


def _driver() -> str | None:
    """The driver's version, from its own tool or from what it shows in /proc."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        ask = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[0]
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def _first_line(node: ElementTree.Element) -> str:
    text = node.get("message") or node.text or ""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


if __name__ == "__main__":
    sys.exit(main())
