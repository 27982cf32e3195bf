"""`adx compile` for real: a tiny model's bundle gets plans of TensorRT for RTX, with and without faults on the way."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_llama

from adx.ci.compile_bundle import CompileRequest, compile_bundle
from adx.cli.main import main
from adx.engines import tensorrt, tensorrt_library
from adx.engines.plan_record import from_json, to_json
from adx.engines.tensorrt import PlanRequest
from adx.engines.tensorrt_library import TensorRTLibrary
from adx.export.bundle import Bundle, refresh_files
from adx.export.errors import BackendError, BundleError, Interrupted
from adx.export.manifest import EngineRecord, Manifest
from adx.export.manifest import to_json as manifest_json

RTX = ("tensorrt_rtx_bindings", "onnxruntime_ep_nv_tensorrt_rtx")
FOLDER = "engines/tensorrt-rtx"
ABSENT = ("torch", "transformers", "onnxruntime", "safetensors", "onnx_ir", "onnxscript", "tokenizers", "jinja2")

needs_rtx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in RTX),
    reason="TensorRT for RTX is not installed: pip install 'adx-toolchain[tensorrt-rtx]'",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with graphs and no plans; its checkpoint is gone."""
    folder = tmp_path_factory.mktemp("compile")
    model = tiny_llama(folder / "model", max_position_embeddings=48)
    args = ["--fp16", "--target", "tensorrt-rtx", "--no-build", "--max-batch-size", "2", "--threads", "1"]
    assert main(["export", str(model), *args, "-o", str(folder / "bundle")]) == 0
    shutil.rmtree(model)
    return folder / "bundle"


@pytest.fixture(scope="module")
def planned(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with plans for sm89, compiled where neither PyTorch nor transformers nor ONNX Runtime is."""
    if any(importlib.util.find_spec(name) is None for name in RTX):
        pytest.skip("TensorRT for RTX is not installed")
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    shutil.copytree(exported, moved)
    code = (
        f"import sys\nfor name in {ABSENT}: sys.modules[name] = None\n"
        "from adx.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    args = ["compile", "moved", "--target", "tensorrt-rtx", "--sm", "sm89", "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        cwd=moved.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (moved.parent / "result.json").write_text(done.stdout)
    return moved


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def with_plans(planned: Path, tmp_path: Path) -> Path:
    shutil.copytree(planned, tmp_path / "planned")
    return tmp_path / "planned"


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if anything is built."""
    monkeypatch.setattr(tensorrt, "compile", None)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder's parent, so that what is left beside it counts too."""
    return {str(path): path.read_bytes() for path in sorted(folder.parent.rglob("*")) if path.is_file()}


def flip(path: Path) -> None:
    """Damage a file so that its size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def compile_args(folder: Path, sm: str = "sm89", *more: str) -> list[str]:
    return ["compile", str(folder), "--target", "tensorrt-rtx", "--sm", sm, *more]


def engine(manifest: Manifest, sm: str) -> EngineRecord:
    return next(one for one in manifest.engines if one.compute_capability == sm)


# --- what a compilation leaves


def test_a_moved_bundle_compiles_without_torch(planned: Path, exported: Path) -> None:
    found = json.loads((planned.parent / "result.json").read_text())
    assert (found["bundle"], found["passed"], found["targets"]) == ("moved", True, ["tensorrt-rtx"])
    assert found["seconds"] > 0
    assert found["peak_rss_mb"] > 0
    assert [plan["phase"] for plan in found["plans"]] == ["prefill", "decode"]
    bundle, before = Bundle.open(planned), Bundle.open(exported).manifest
    bundle.verify_files()
    assert found["bytes"] == bundle.total_bytes()
    assert [one.target for one in bundle.manifest.engines] == ["tensorrt-rtx", "onnx"]
    assert bundle.manifest.engine().limits == before.limits
    assert {file.path for file in bundle.manifest.files} - {file.path for file in before.files} == {
        f"{FOLDER}/sm89/{name}"
        for name in ("build.log", "prefill.plan", "prefill.plan.json", "decode.plan", "decode.plan.json")
    }
    assert bundle.manifest.parity == before.parity


@needs_rtx
def test_engines_join_those_that_are_there(with_plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the same target and capability is built anew; the others keep their bytes and their place."""
    monkeypatch.setattr(sys, "argv", ["adx", "compile", "b", "--token", "hf_abcdefghijkl"])
    monkeypatch.chdir(with_plans.parent)
    before = Bundle.open(with_plans).manifest
    result = compile_bundle(
        CompileRequest(Path("planned"), ("tensorrt-rtx",), plans=PlanRequest(("sm86",)), max_seq_len=24)
    )
    assert result.passed
    middle = Bundle.open(with_plans).manifest
    assert [one.compute_capability for one in middle.engines] == ["sm89", "sm86", None]
    assert set(before.files) <= set(middle.files)
    assert engine(middle, "sm86").limits == dataclasses.replace(before.limits, max_input_len=24, max_seq_len=24)
    assert middle.limits == before.limits

    assert main(compile_args(with_plans, "sm89", "--max-batch-size", "3")) == 0
    after = Bundle.open(with_plans).manifest
    assert [one.compute_capability for one in after.engines] == ["sm89", "sm86", None]
    assert engine(after, "sm89").limits.max_batch_size == 3
    old, new = ({file.path: file.sha256 for file in one.files} for one in (middle, after))
    changed = {path for path in old | new if old.get(path) != new.get(path)}
    assert changed == set(engine(after, "sm89").files)
    log = (with_plans / FOLDER / "sm89/build.log").read_text()
    assert len(re.findall(" BUILD ", log)) == 2, "the log of the engine that was replaced went with it"
    assert after.provenance.command[: len(before.provenance.command)] == before.provenance.command
    assert "".join(after.provenance.command).count("&&") == "".join(before.provenance.command).count("&&") + 2
    assert "hf_abcdefghijkl" not in manifest_json(after)
    assert [path.name for path in with_plans.parent.iterdir()] == ["planned"]


@needs_rtx
def test_another_output_leaves_the_bundle_as_it_is(bundle: Path) -> None:
    before, out = content(bundle), bundle.with_name("out")
    assert main(compile_args(bundle, "sm89", "-o", str(out))) == 0
    assert {path: data for path, data in content(bundle).items() if path in before} == before
    Bundle.open(out).verify_files()
    inodes = {path.stat().st_ino for path in bundle.rglob("*")}
    assert not {path.stat().st_ino for path in out.rglob("*")} & inodes, "two bundles share no file"


@pytest.mark.usefixtures("no_build")
@needs_rtx
def test_an_output_that_is_there_is_refused_before_any_work(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = bundle.with_name("out")
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert main(compile_args(bundle, "sm89", "-o", str(out))) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(compile_args(bundle, "sm89", "-o", str(out), "--force")) == 2
    assert "is not an adx bundle" in capsys.readouterr().err


# --- what is refused


@pytest.mark.usefixtures("no_build")
@needs_rtx
@pytest.mark.parametrize("name", ["engines/onnx/decode.onnx", "engines/onnx/weights.data", "config.json"])
def test_a_damaged_bundle_is_refused_before_any_build(
    name: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashing the new bundle would otherwise make the damage part of it."""
    flip(bundle / name)
    before = content(bundle)
    assert main(compile_args(bundle)) == 1
    assert f"{name}: sha256 is" in capsys.readouterr().err
    assert content(bundle) == before


@needs_rtx
def test_a_damaged_plan_is_no_reason_not_to_build_it_again(
    with_plans: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A truncated plan is refused where it would be kept, and replaced where it is what is compiled.

    On a file system without hard links.
    """

    def link(*args: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    plan = with_plans / FOLDER / "sm89/decode.plan"
    plan.write_bytes(plan.read_bytes()[:1000])
    assert main(compile_args(with_plans, "sm86")) == 1
    assert "decode.plan has 1000 bytes" in capsys.readouterr().err
    assert main(compile_args(with_plans, "sm89")) == 0
    Bundle.open(with_plans).verify_files()


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--max-seq-len 49", "--max-seq-len 49 is more than the 48 tokens that the model was exported for: pass at"),
        ("--max-seq-len 8 --max-input-len 9", "--max-input-len 9 is more than --max-seq-len 8"),
        ("--max-input-len 49", "--max-input-len 49 is more than --max-seq-len 48"),
        ("--max-shapes input_ids:9x9x9", "input_ids: found 9x9x9 with 3 dimensions"),
        ("--max-shapes input_ids", "shapes are written input_ids:1x16"),
    ],
)
def test_limits_out_of_range_are_refused_with_the_limits(
    args: str, words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(bundle)
    assert main(compile_args(bundle, "sm89", *args.split())) == 2
    assert words in capsys.readouterr().err
    assert content(bundle) == before


@pytest.mark.usefixtures("no_build")
@needs_rtx
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--timing-cache", "t"], "--timing-cache: TensorRT for RTX"),
        (["--hardware-compatibility"], "builds for each GPU apart: repeat --sm instead"),
        (["--version-compatible"], "has no lean runtime"),
        (["--sm", "sm90"], "--sm sm90 is not accepted: TensorRT for RTX"),
    ],
)
def test_what_the_library_does_not_do_is_refused(
    args: list[str], words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(compile_args(bundle, "sm89", *args)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize(
    ("target", "words"), [("ort-cuda", "it needs no plans"), ("ort-cpu", "adx export MODEL --target ort-cpu")]
)
def test_targets_without_plans_are_refused(
    target: str, words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", str(bundle), "--target", target]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_build")
def test_a_bundle_without_graphs_says_how_to_get_one(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Bundle.open(bundle).manifest
    engines = tuple(dataclasses.replace(one, target="ort-cpu") for one in manifest.engines)
    (bundle / "adx.json").write_text(manifest_json(dataclasses.replace(manifest, engines=engines)))
    assert main(compile_args(bundle)) == 1
    error = capsys.readouterr().err
    assert "has no graphs to compile plans from (engines/onnx/), it has ort-cpu" in error
    assert "adx export MODEL --int8 --target tensorrt-rtx --no-build" in error


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize("name", ["absent", "empty"])
def test_what_is_no_bundle_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(compile_args(tmp_path / name)) == 1
    assert re.search("does not exist|is not an adx bundle", capsys.readouterr().err)


@pytest.mark.usefixtures("no_build")
@needs_rtx
def test_a_file_that_is_not_the_bundles_is_not_lost(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundle's folder is replaced as a whole."""
    (bundle / "engines/notes.txt").write_text("mine")
    assert main(compile_args(bundle)) == 1
    assert "1 file(s) that are not the bundle's, as engines/notes.txt" in capsys.readouterr().err
    assert (bundle / "engines/notes.txt").read_text() == "mine"


# --- what is not here


@pytest.mark.usefixtures("no_build")
def test_a_missing_library_fails_with_5_and_the_command_for_its_host(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    tensorrt_library._load.cache_clear()
    before = content(bundle)
    args = ["--max-batch-size", "2", "--workspace", "1G", "--version-compatible"]
    assert main(["compile", str(bundle), "--target", "tensorrt", *args]) == 5
    error = capsys.readouterr().err
    assert "TensorRT is not installed: pip install 'tensorrt>=10.14'; or run this on a host that has it: " in error
    command = f"adx compile {bundle} --target tensorrt --max-batch-size 2 --workspace 1073741824B --version-compatible"
    assert error.endswith(f"{command}\n")
    assert content(bundle) == before


@pytest.mark.usefixtures("no_build")
def test_a_missing_gpu_fails_with_5(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = TensorRTLibrary("tensorrt", None, "11.0.0", "13")
    monkeypatch.setattr(tensorrt_library, "local_capability", lambda: None)
    monkeypatch.setattr(tensorrt, "load_library", lambda target, hint="": library)
    assert main(["compile", str(bundle), "--target", "tensorrt"]) == 5
    assert "no CUDA device or driver was found here: run the same command there" in capsys.readouterr().err


def test_an_export_without_the_library_says_how_to_build_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    tensorrt_library._load.cache_clear()
    out = tmp_path / "out"
    assert main(["export", str(tmp_path), "--fp16", "--target", "tensorrt", "-o", str(out)]) == 5
    error = capsys.readouterr().err
    assert "pip install 'tensorrt>=10.14'" in error
    assert "--no-build" in error
    assert f"adx compile {out} --target tensorrt" in error


# --- what happens meanwhile


@needs_rtx
@pytest.mark.parametrize("stage", ["checking the bundle", "copying", "building prefill", "building decode", "hashing"])
def test_an_interrupted_compilation_leaves_the_bundle_and_can_be_run_again(stage: str, with_plans: Path) -> None:
    """SIGTERM at each stage, with a plan that is to be replaced and one that is to be added."""
    before = content(with_plans)
    request = CompileRequest(with_plans, ("tensorrt-rtx",), plans=PlanRequest(("sm89",)))
    sent: list[str] = []

    def interrupt(name: str, fraction: float | None) -> None:
        if name.startswith(stage) and not sent:
            sent.append(name)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        compile_bundle(request, interrupt)
    assert sent
    assert content(with_plans) == before
    if stage == "building decode":
        assert compile_bundle(request).passed


@needs_rtx
def test_a_bundle_that_another_process_changed_meanwhile_is_not_written_over(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest

    def change(name: str, fraction: float | None) -> None:
        if name.startswith("building decode"):
            (bundle / "adx.json").write_text(manifest_json(dataclasses.replace(manifest, adx_version="9")))

    with pytest.raises(BundleError, match="was changed by another process meanwhile"):
        compile_bundle(CompileRequest(bundle, ("tensorrt-rtx",), plans=PlanRequest(("sm89",))), change)
    assert Bundle.open(bundle).manifest.adx_version == "9"


# --- what inspect shows of it


def test_inspect_shows_the_plans(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers: a key and a value update each, one attention each. Nothing of TensorRT is imported for it."""
    code = (
        "import sys\nfor name in ('tensorrt', 'tensorrt_rtx_bindings', 'onnxruntime'): sys.modules[name] = None\n"
        "from adx.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    args = [sys.executable, "-c", code, "inspect", str(planned)]
    text = subprocess.run(args, capture_output=True, text=True, timeout=60, check=True).stdout
    found = json.loads(subprocess.run([*args, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout)
    version = found["plans"][0]["library_version"]
    for words in (
        f"plan        {FOLDER}/sm89/decode.plan: tensorrt-rtx {version}, CUDA ",
        "sm89, decode, ",
        "KV cache updates 4, attention layers 2 whole and 0 decomposed, plugins 0",
        "profile prompt: batch 1/2/2, new tokens 1/48/48, cache 48",
        "profile step: batch 1/2/2, new tokens 1, cache 48",
        "profile chunk: batch 1/2/2, new tokens 1/8/16, cache 48",
        "options: the library's own",
        "MATRIX_MULTIPLY",
        "HALF",
    ):
        assert words in text, words
    prefill, decode = found["plans"]
    assert (prefill["plan"], decode["plan"]) == (f"{FOLDER}/sm89/prefill.plan", f"{FOLDER}/sm89/decode.plan")
    assert decode["facts"]["kv_cache_updates"] == 4
    assert decode["facts"]["plugins"] == 0
    assert decode["facts"]["weights_bytes"] > 0
    assert decode["plan_bytes"] == (planned / decode["plan"]).stat().st_size
    assert decode["profiles"] == [
        {"name": "step", "batch": [1, 2, 2], "new_tokens": [1, 1, 1], "cache": [48, 48, 48]},
        {"name": "chunk", "batch": [1, 2, 2], "new_tokens": [1, 8, 16], "cache": [48, 48, 48]},
    ]


def test_inspect_shows_options_warnings_and_what_was_not_said(
    with_plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_plans / FOLDER / "sm89/decode.plan.json"
    record = from_json(path.read_text(), path.name)
    facts = dataclasses.replace(
        record.facts, attentions=0, attentions_decomposed=2, scratch_bytes=None, warnings=("slow attention",)
    )
    options = dataclasses.replace(record.options, opt_level=0, workspace_bytes=2_000_000, strip=True)
    changed = dataclasses.replace(record, facts=facts, options=options, version_compatible=True, cuda=None)
    path.write_text(to_json(changed))
    refresh_files(with_plans)
    assert main(["inspect", str(with_plans)]) == 0
    out = capsys.readouterr().out
    assert "attention layers 0 whole and 2 decomposed" in out
    assert "scratch not said" in out
    assert "options: opt level 0, workspace 2.0 MB, version compatible, without weights" in out
    assert "the builder warned: slow attention" in out


def test_inspect_refuses_a_record_that_was_changed(with_plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_plans / FOLDER / "sm89/decode.plan.json"
    path.write_text(path.read_text().replace('"plugins": 0', '"plugins": 1'))
    refresh_files(with_plans)
    assert main(["inspect", str(with_plans)]) == 1
    assert "decode.plan.json was changed after it was written" in capsys.readouterr().err


def test_a_build_that_fails_leaves_the_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise BackendError("the GPU is gone")

    monkeypatch.setattr(tensorrt, "prepare", lambda target, plans, hint: (None, ("sm89",)))
    monkeypatch.setattr(tensorrt, "compile", fail)
    before = content(bundle)
    assert main(compile_args(bundle)) == 5
    assert "the GPU is gone" in capsys.readouterr().err
    assert content(bundle) == before


@needs_rtx
def test_two_compilations_at_once_leave_a_whole_bundle(bundle: Path) -> None:
    """They share nothing on the disk; the one that ends last is told that the bundle changed."""
    code = "import sys; from adx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    args = [compile_args(bundle, sm) for sm in ("sm80", "sm86")]
    running = [
        subprocess.Popen([sys.executable, "-c", code, *each], stderr=subprocess.PIPE, text=True) for each in args
    ]
    said = [each.communicate(timeout=240)[1] for each in running]
    codes = [each.returncode for each in running]
    assert 0 in codes
    opened = Bundle.open(bundle)
    opened.verify_files()
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle"]
    for code_, words in zip(codes, said, strict=True):
        assert code_ == 0 or "changed by another process meanwhile" in words


@needs_rtx
def test_a_bundle_is_compiled_from_inside_its_folder(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` has no name that something could be written beside."""
    monkeypatch.chdir(bundle)
    assert main(compile_args(Path("."))) == 0
    Bundle.open(bundle).verify_files()


def test_an_output_inside_the_bundle_is_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(bundle)
    assert main(compile_args(bundle, "sm89", "-o", str(bundle / "inside"))) == 2
    assert "lies inside the bundle" in capsys.readouterr().err
    assert content(bundle) == before


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--max-batch-size", "99999999999999"), "a tensor holds"),
        (("--workspace", "99999999999999999999G"), "1 byte to 2"),
        (("--int8",), "precision is that of the bundle's graphs"),
    ],
)
def test_what_no_plan_can_be_is_refused_before_any_work(
    option: tuple[str, ...], words: str, bundle: Path, no_build: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(compile_args(bundle, "sm89", *option)) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_plans_of_another_bundle_do_not_verify(with_plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashes refreshed, only the record tells that a plan was built from other graphs."""
    record = next(with_plans.glob("engines/tensorrt-rtx/sm89/decode.plan.json"))
    changed = dataclasses.replace(from_json(record.read_text(), record.name), graph_sha256="0" * 64)
    record.write_text(to_json(changed))
    refresh_files(with_plans)
    assert main(["verify", str(with_plans)]) == 1
    assert "was not built from this bundle's graphs" in " ".join(capsys.readouterr().err.split())


def test_a_lost_record_names_the_command_that_builds_again(
    with_plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (with_plans / FOLDER / "sm89/decode.plan.json").unlink()
    assert main(["verify", str(with_plans)]) == 1
    assert "--target tensorrt-rtx --sm sm89" in capsys.readouterr().err
