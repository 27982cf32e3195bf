"""The wheel, installed alone in an environment of its own: the command exports and generates, far from the sources."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from models import byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[1]
PACKAGES = ("export", "calibration", "engines", "runtime", "ci", "cli")
BUILD_TOOLS = ("build", "setuptools", "pip")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in BUILD_TOOLS),
        reason=f"building and installing without a network needs {', '.join(BUILD_TOOLS)} in this environment",
    ),
]


def run(*command: str | Path, cwd: Path) -> str:
    """A command that knows nothing of the source tree, nor of this environment but what the other one links to."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of an environment lie into which the wheel alone was installed.

    What adx depends on comes from this environment by a path file, so nothing is downloaded; path files of this
    environment, an editable adx among them, do not work there.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_it_is_the_wheel_that_runs(binaries: Path, tmp_path: Path) -> None:
    """Every package comes from the new environment."""
    code = "".join(f"import adx.{name}; print(adx.{name}.__file__)\n" for name in PACKAGES)
    places = run(binaries / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(places) == len(PACKAGES)
    assert all(place.startswith(str(binaries.parent)) for place in places)
    assert run(binaries / "adx", "--version", cwd=tmp_path).startswith("adx ")


def test_it_exports_and_generates(binaries: Path, tmp_path: Path) -> None:
    """From a folder that holds nothing but the checkpoint."""
    byte_tokenizer(tiny_llama(tmp_path / "tiny", vocab_size=320))
    options = ("--int8", "-o", "out", "--threads", "1", "--allow-parity-failure", "--json")
    exported = json.loads(run(binaries / "adx", "export", "tiny", *options, cwd=tmp_path))
    assert exported["bundle"] == "out"
    assert exported["targets"] == ["ort-cpu"]
    shutil.rmtree(tmp_path / "tiny")
    answer = run(
        binaries / "adx", "generate", "out", "--prompt", "hello", "-n", "5", "--ignore-eos", "--json", cwd=tmp_path
    )
    assert json.loads(answer)["completion_tokens"] == 5
