"""`ci/gpu-check`: its verdicts and exit codes, here where no GPU is and with backends that are made up."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from adx.ci import gpu_check
from adx.ci.gpu_check import BACKENDS, NO_GPU, Verdict, main, obstacle, overall, read_report, run_tests
from adx.engines.devices import Gpu, gpus

ROOT = Path(__file__).parents[1]
ADA = Gpu("NVIDIA RTX 4090", "sm89")
HOPPER = Gpu("NVIDIA H200", "sm90")
PASSING = "def test_one(record_property):\n    record_property('latency', 'first token 1 ms')\ndef test_two(): pass\n"
FAILING = "def test_good(): pass\ndef test_bad():\n    assert 1 == 2, 'KL is 0.5, at most 0.001 is accepted'\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='no kernel')\ndef test_one(): pass\n"
ERROR = (
    "import pytest\n@pytest.fixture\ndef broken(): raise OSError('no plan')\n"
    "def test_one(broken): pass\ndef test_two(): pass\n"
)

needs_no_gpu = pytest.mark.skipif(bool(gpus()), reason="there is a GPU here: ci/gpu-check itself tells more")


@pytest.fixture
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose checks are made up: one file a backend, written by the test."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--bundles')\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "gpus", lambda: (ADA,))
    return folder


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these backends' libraries are missing."""
    lacks = {name: f"{name} is not installed" for name in names}
    monkeypatch.setattr(gpu_check, "obstacle", lambda backend, devices: lacks.get(backend))


@needs_no_gpu
def test_without_a_gpu_it_says_why_and_ends_with_5() -> None:
    """The command as a user runs it."""
    done = subprocess.run([ROOT / "ci/gpu-check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5, done.stderr
    lines = done.stdout.splitlines()
    assert f"none: {NO_GPU}" in lines[1]
    for backend in BACKENDS:
        (line,) = (line for line in lines if line.startswith(f"{backend} "))
        assert "not checked" in line
        assert line.split(maxsplit=3)[3].startswith(NO_GPU)
    assert lines[-1].split(maxsplit=1) == ["overall", "nothing to check on: the lines above say what is missing"]


@needs_no_gpu
def test_every_check_is_skipped_with_the_reason() -> None:
    """What pytest alone does with them here; nothing is exported for it."""
    files = [f"tests/gpu/{name}" for name in BACKENDS.values()]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert reasons
    assert all(f": {NO_GPU}" in line for line in reasons)
    assert " passed" not in done.stdout


def test_one_passes_one_fails_one_is_missing(
    backends: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (backends / BACKENDS["ort-cuda"]).write_text(PASSING)
    (backends / BACKENDS["tensorrt"]).write_text(FAILING)
    missing(monkeypatch, "tensorrt-rtx")
    args = ["--backend", "ort-cuda", "--backend", "tensorrt", "--backend", "tensorrt-rtx"]
    assert main(args) == 1
    lines = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    assert "sm89" in lines["gpu"]
    assert lines["ort-cuda"].split(maxsplit=1)[1].startswith("yes          first token 1 ms; 2 checks passed in ")
    assert lines["tensorrt"].split()[1] == "no"
    assert "1 checks passed, 1 failed in " in lines["tensorrt"]
    assert "test_bad: AssertionError: KL is 0.5, at most 0.001 is accepted" in lines["tensorrt"]
    assert lines["tensorrt-rtx"].split(maxsplit=1)[1] == "not checked  tensorrt-rtx is not installed"
    assert lines["overall"].split()[1] == "no:"
    assert main(args[:2]) == 0
    assert capfd.readouterr().out.splitlines()[-1].split()[1] == "yes:"
    assert main(args[4:]) == 5


def test_json_is_one_object(backends: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (backends / BACKENDS["ort-cuda"]).write_text(PASSING)
    missing(monkeypatch, "tensorrt")
    assert main(["--json", "--backend", "ort-cuda", "--backend", "tensorrt"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["verdict"] == "yes"
    assert "sm89" in found["machine"]["gpu"]
    good, absent = found["backends"]
    assert (good["backend"], good["state"], good["passed"], good["latency"]) == (
        "ort-cuda",
        "yes",
        2,
        "first token 1 ms",
    )
    assert (absent["state"], absent["reason"]) == ("not checked", "tensorrt is not installed")


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (SKIPPED, "not checked", "no kernel"),
        (ERROR, "no", "test_one: failed on setup"),
        ("import os\nos._exit(139)\n", "no", "the checks ended with code 139 before their report"),
        ("import nothing_of_that_name\n", "no", "collection failure"),
        ("", "not checked", ""),
    ],
    ids=["all skipped", "fixture", "crash", "import", "empty"],
)
def test_what_is_no_success(backends: Path, tmp_path: Path, code: str, state: str, reason: str) -> None:
    """A crash, an error in a fixture or checks that were all skipped are never a yes."""
    (backends / BACKENDS["tensorrt"]).write_text(code)
    verdict = run_tests(tmp_path, "tensorrt", tmp_path, 60)
    assert (verdict.state, verdict.backend) == (state, "tensorrt")
    assert reason in verdict.reason


def test_checks_that_hang_are_ended(backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they have started; the next backend is told that no time is left."""
    mark = tmp_path / "alive"
    child = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {_beating(mark)!r}])\ntime.sleep(60)\n"
    )
    (backends / BACKENDS["tensorrt"]).write_text(child)
    missing(monkeypatch)
    started = time.monotonic()
    run = functools.partial(run_tests, tmp_path)
    verdicts = gpu_check.check(("tensorrt", "ort-cuda"), (ADA,), run, 4.0)
    assert time.monotonic() - started < 20
    assert [verdict.state for verdict in verdicts] == ["no", "no"]
    assert verdicts[0].reason.startswith("not done after 4 s: raise --timeout")
    assert verdicts[1].reason == "no time was left of 4 s: raise --timeout, or check one --backend at a time"
    last = mark.read_text()
    time.sleep(0.5)
    assert mark.read_text() == last


def _beating(path: Path) -> str:
    return f"import time, pathlib\nfor n in range(600): pathlib.Path({str(path)!r}).write_text(str(n)); time.sleep(0.1)"


def test_the_checks_share_a_folder_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles that one backend's checks made are there for the next."""
    missing(monkeypatch)
    folders: list[Path] = []

    def run(backend: str, folder: Path, seconds: float) -> Verdict:
        folders.append(folder)
        assert 0 < seconds <= 100
        (folder / backend).write_text("")
        return Verdict(backend, "yes")

    gpu_check.check(("tensorrt", "ort-cuda"), (ADA,), run, 100.0)
    assert folders[0] == folders[1]
    assert not folders[0].exists()


def test_the_worst_verdict_counts() -> None:
    yes, no, absent = (Verdict("x", state) for state in ("yes", "no", "not checked"))
    cases: list[tuple[Sequence[Verdict], str]] = [
        ((yes, no, absent), "no"),
        ((yes, absent), "yes"),
        ((absent,), "not checked"),
        ((), "not checked"),
    ]
    assert [overall(verdicts) for verdicts, _ in cases] == [state for _, state in cases]


def test_a_report_that_says_good_and_a_code_that_says_bad(tmp_path: Path) -> None:
    """An error at the end of the run, as a driver's, is in the exit code alone."""
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite><testcase name="test_one"/></testsuite></testsuites>')
    assert read_report("tensorrt", report, 0, 1.0).state == "yes"
    for code in (3, -11):
        verdict = read_report("tensorrt", report, code, 1.0)
        assert (verdict.state, verdict.reason) == ("no", f"pytest ended with code {code}")


def test_a_gpu_that_a_library_does_not_support_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT for RTX is for some generations only; another is named with those that it takes."""
    monkeypatch.setattr(gpu_check, "_missing_library", lambda backend: [])
    monkeypatch.setattr(gpu_check, "load_library", lambda target: SimpleNamespace(name="TensorRT for RTX 1.7"))
    monkeypatch.setattr(gpu_check, "capabilities", lambda library: ("sm86", "sm89"))
    assert obstacle("tensorrt-rtx", (ADA,)) is None
    assert obstacle("tensorrt-rtx", (HOPPER,)) == "TensorRT for RTX 1.7 is for sm86, sm89, not for sm90"
    assert obstacle("tensorrt", (HOPPER,)) is None
    assert obstacle("tensorrt", ()) == NO_GPU


def test_what_is_missing_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_is_installed", lambda module: False)
    for backend, words in {
        "tensorrt": ("pip install 'tensorrt>=10.14'", "pip install cuda-bindings"),
        "tensorrt-rtx": ("pip install 'tensorrt-rtx-cu13-bindings", "pip install cuda-bindings"),
    }.items():
        reason = obstacle(backend, (ADA,))
        assert reason is not None
        assert all(word in reason for word in words)
        assert NO_GPU not in reason
        without = obstacle(backend, ())
        assert without == f"{NO_GPU}; {reason}"


@pytest.mark.parametrize(("package", "extra"), [("onnxruntime", "cpu"), ("onnxruntime-gpu", "gpu")])
@pytest.mark.parametrize("devices", [(), (ADA,)])
def test_what_the_checks_themselves_need_is_named(
    package: str,
    extra: str,
    devices: tuple[Gpu, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After the missing GPU, and with the extra that leaves the ONNX Runtime here in its place."""
    monkeypatch.setattr(gpu_check, "TOOLS", ("pytest", "no_such_library"))
    monkeypatch.setattr(gpu_check, "gpus", lambda: devices)
    monkeypatch.setattr(gpu_check, "_version", {package: "1.32.0"}.get)
    assert main(["--backend", "tensorrt"]) == 5
    first = "" if devices else f"{NO_GPU}; "
    hint = f"no_such_library not installed: pip install -c constraints.txt -e '.[{extra}]' pytest"
    assert f"not checked  {first}{hint}\n" in capsys.readouterr().out


@needs_no_gpu
def test_the_checks_are_those_of_the_checkout_that_the_command_lies_in(tmp_path: Path) -> None:
    """An adx that was installed as a copy has no tests beside it; that it is not the checkout is said."""
    copy = tmp_path / "clone"
    (copy / "ci").mkdir(parents=True)
    (copy / "tests/gpu").mkdir(parents=True)
    shutil.copy(ROOT / "ci/gpu-check", copy / "ci/gpu-check")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    command = ["sh", str(copy / "ci/gpu-check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 5, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("adx "))
    assert f"not the checkout {copy}: pip install -c constraints.txt -e '.[cpu]' pytest" in line
    assert "tests/gpu" not in done.stdout
    shutil.rmtree(copy / "tests")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert f"not checked  {NO_GPU}; {copy} has no tests/gpu" in done.stdout


@pytest.mark.parametrize(
    "args", [["--backend", "cpu"], ["--timeout", "0"], ["--timeout", "soon"], ["--checkout", "/no/folder"], ["more"]]
)
def test_wrong_options_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert "ci/gpu-check: error" in capsys.readouterr().err


def test_it_starts_without_adx(tmp_path: Path) -> None:
    """A checkout that nothing is installed for: what to install, and exit code 5."""
    (tmp_path / "ci").mkdir()
    script = tmp_path / "ci" / "gpu-check"
    script.write_text((ROOT / "ci/gpu-check").read_text())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["sh", script], capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 5
    assert f"adx is not installed here: in {tmp_path} run python3 -m venv" in done.stderr
