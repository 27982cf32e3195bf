"""Bundles: written whole or not at all, opened with their sizes and paths checked, verified by hash."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adx.export import bundle_swap
from adx.export.bundle import Bundle, BundleWriter, check_free_space, refresh_files
from adx.export.errors import AdxError, BundleError, OutputExistsError, UsageError
from adx.export.manifest import (
    EngineRecord,
    LayerQuantization,
    Limits,
    Manifest,
    Provenance,
    QuantizationRecord,
    from_json,
    provenance,
    redact,
    to_json,
)
from adx.export.spec import GraphSpec, KVCacheSpec, ModelSpec, TensorSpec

ENGINE = "engines/ort-cpu/model.onnx"
WEIGHTS = "engines/ort-cpu/weights.data"


def manifest(**changes: Any) -> Manifest:
    limits = Limits(None, 128, 128)
    cache = KVCacheSpec(layers=2, kv_heads=2, head_dim=16, capacity=128, windows=(None, 8))
    model = ModelSpec("ll", None, "LlamaForCausalLM", "llama", "float32", 10, 256, 64, 4, 128, cache, "0" * 64)
    graph = GraphSpec("decode", ENGINE, (TensorSpec("input_ids", "int64", ("batch_size", 1)),), ())
    engine = EngineRecord(
        "ort-cpu", (ENGINE, WEIGHTS), ENGINE, ENGINE, {"onnxruntime": "1.32.0"}, ("avx2",), None, limits
    )
    layer = LayerQuantization("lm_head", 8, "symmetric", 32, "kept at 8 bits")
    whole = Manifest(
        adx_version="0.1.0",
        model=model,
        graphs=(graph,),
        quantization=QuantizationRecord("int8", None, (layer,)),
        engines=(engine,),
        limits=limits,
        parity={"passed": True, "kl_mean": 0.001, "cases": [{"batch": 1}]},
        provenance=Provenance({"torch": "2.13"}, ("adx", "export"), "2026-01-01T00:00:00+00:00"),
    )
    return dataclasses.replace(whole, **changes)


def fill(folder: Path, weights: bytes = b"w" * 1000) -> None:
    (folder / "engines/ort-cpu").mkdir(parents=True)
    (folder / ENGINE).write_bytes(b"graph")
    (folder / WEIGHTS).write_bytes(weights)
    (folder / "config.json").write_text("{}")


def write(out: Path, *, force: bool = False, weights: bytes = b"w" * 1000) -> Manifest:
    with BundleWriter(out, force=force) as writer:
        fill(writer.folder, weights)
        return writer.commit(manifest())


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "adx.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write(tmp_path / "out")
    return tmp_path / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the manifest


def test_a_manifest_survives_the_way_to_json_and_back(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    raw = json.loads((bundle / "adx.json").read_text())
    assert list(raw)[:4] == ["schema_version", "adx_version", "model", "kv_cache"]
    assert "kv_cache" not in raw["model"]
    assert opened.manifest == from_json(to_json(opened.manifest))
    assert opened.manifest == dataclasses.replace(manifest(), files=opened.manifest.files)
    assert opened.manifest.kv_cache.windows == (None, 8)


def test_every_file_is_listed_with_size_and_hash(bundle: Path) -> None:
    listed = {record.path: record for record in Bundle.open(bundle).manifest.files}
    assert sorted(listed) == sorted([ENGINE, WEIGHTS, "config.json"])
    assert listed[WEIGHTS].size == 1000
    assert listed[WEIGHTS].sha256 == hashlib.sha256(b"w" * 1000).hexdigest()
    Bundle.open(bundle).verify_files()
    assert Bundle.open(bundle).total_bytes() == sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(surprise=1), "unknown key 'surprise'"),
        (lambda raw: raw["model"].update(extra=1), "unknown key 'extra'"),
        (lambda raw: raw["engines"][0].update(library="evil.so"), "unknown key 'library'"),
        (lambda raw: raw.pop("limits"), "'limits' is missing"),
        (lambda raw: raw.pop("kv_cache"), "'kv_cache' is missing"),
        (lambda raw: raw["kv_cache"].pop("head_dim"), "'head_dim' is missing"),
        (lambda raw: raw["kv_cache"].update(head_dim="16"), "must be a int, found str"),
        (lambda raw: raw["kv_cache"].update(head_dim=True), "must be a int, found bool"),
        (lambda raw: raw["kv_cache"].update(head_dim=16.0), "must be a int, found float"),
        (lambda raw: raw["kv_cache"].update(head_dim=0), "must be 1 or more"),
        (lambda raw: raw["kv_cache"].update(windows=[8]), "1 windows for 2 layers"),
        (lambda raw: raw["kv_cache"].update(windows=[8, 1.5]), r"windows\[1\]: must be a int"),
        (lambda raw: raw["graphs"][0].update(phase="train"), "must be 'prefill' or 'decode'"),
        (lambda raw: raw["graphs"][0]["inputs"][0].update(dims=[1.5]), "must be str or int"),
        (lambda raw: raw["limits"].update(max_seq_len=-1), "limits must be 1 or more"),
        (lambda raw: raw.update(files={}), "must be a list"),
        (lambda raw: raw.update(model=[]), "'model' must be an object"),
        (lambda raw: raw["files"][0].update(size=-5), "impossible size"),
        (lambda raw: raw["files"][0].update(sha256="../../x"), "impossible size or sha256"),
        (lambda raw: raw["files"].append(raw["files"][0]), "twice"),
        (lambda raw: raw["files"].append({**raw["files"][0], "path": "ADX.json"}), "the manifest itself"),
        (lambda raw: raw["engines"][0]["files"].append("hidden.so"), "'files' does not list"),
        (lambda raw: raw["engines"][0].update(prefill="other.onnx"), "not among its files"),
        (lambda raw: raw["parity"].pop("passed"), "parity.passed"),
        (lambda raw: raw["parity"].update(passed=None), "parity.skipped does not say why"),
        (lambda raw: raw.update(schema_version=2, adx_version="0.9"), r"adx-toolchain==0.9"),
        (lambda raw: raw.update(schema_version="1"), "no integer"),
        (lambda raw: raw.pop("schema_version"), "'schema_version' is missing"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=words):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../secret",
        "engines/../../secret",
        "engines/./x",
        "engines//x",
        "engines/",
        "",
        ".",
        "C:/x",
        "C:\\x",
        "\\\\host\\share",
        "a\\..\\b",
        "a\x00b",
        "a\nb",
    ],
)
@pytest.mark.parametrize("place", ["files", "engines", "graphs"])
def test_paths_that_leave_the_bundle_are_refused(bundle: Path, path: str, place: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        if place == "files":
            raw["files"][0]["path"] = path
        elif place == "engines":
            raw["engines"][0]["files"][1] = path
        else:
            raw["graphs"][0]["file"] = path

    edit(bundle, change)
    with pytest.raises(BundleError, match="is refused"):
        Bundle.open(bundle)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_links_that_lead_out_are_refused(bundle: Path, tmp_path: Path, of: str) -> None:
    """A file of the right size and hash, but outside the bundle."""
    outside = tmp_path / "outside"
    if of == "file":
        (bundle / WEIGHTS).rename(outside)
        (bundle / WEIGHTS).symlink_to(outside)
    else:
        (bundle / "engines").rename(outside)
        (bundle / "engines").symlink_to(outside)
    with pytest.raises(BundleError, match="leads out of the bundle"):
        Bundle.open(bundle)


def test_a_link_inside_the_bundle_is_followed(bundle: Path) -> None:
    (bundle / WEIGHTS).rename(bundle / "real.data")
    (bundle / WEIGHTS).symlink_to("../../real.data")
    Bundle.open(bundle).verify_files()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "nonsense", '{"schema_version": 1, "schema_version": 1}', "[" * 100_000, '{"schema_version": NaN}'],
)
def test_damaged_json_is_one_clear_error(bundle: Path, text: str) -> None:
    (bundle / "adx.json").write_text(text)
    with pytest.raises(BundleError, match=r"adx\.json"):
        Bundle.open(bundle)


def test_bytes_that_are_no_text_are_one_clear_error(bundle: Path) -> None:
    (bundle / "adx.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.open(bundle)


def test_nan_is_not_written(tmp_path: Path) -> None:
    """A manifest that this tool itself could not read again must not be written."""
    with pytest.raises(BundleError, match="JSON"):
        to_json(manifest(parity={"passed": True, "kl_mean": float("nan")}))


def test_the_command_line_is_stored_without_secrets() -> None:
    command = ["adx", "export", "m", "--token", "hf_abcdefghijkl", "--api-key=xyz", "https://me:pw@host/x", "--int8"]
    hidden = redact([*command, "HF_TOKEN=hf_abcdefghijklmnop"])
    assert hidden == (
        "adx", "export", "m", "--token", "***", "--api-key=***", "https://***@host/x", "--int8", "HF_TOKEN=***",
    )  # fmt: skip
    assert redact(["--max-new-tokens", "7", "--tokenizer", "x"]) == ("--max-new-tokens", "7", "--tokenizer", "x")
    record = provenance(command)
    assert "hf_abc" not in str(record)
    assert {"python", "torch", "adx-toolchain"} <= set(record.packages)


# --- opening


def test_what_is_no_bundle_is_named_with_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    for name, words in {"empty": "adx export MODEL", "hf": "Hugging Face checkpoint", "none": "does not exist"}.items():
        with pytest.raises(BundleError, match=words):
            Bundle.open(tmp_path / name)
    with pytest.raises(BundleError, match="is a file"):
        Bundle.open(tmp_path / "hf/config.json")


@pytest.mark.parametrize("fault", ["missing", "short", "long", "folder"])
def test_missing_or_resized_files_are_found_at_load(bundle: Path, fault: str) -> None:
    path = bundle / WEIGHTS
    content = path.read_bytes()
    path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault != "missing":
        path.write_bytes(content[:-1] if fault == "short" else content + b"x")
    with pytest.raises(BundleError, match=r"weights\.data"):
        Bundle.open(bundle)


def test_changed_bytes_are_found_by_hash(bundle: Path) -> None:
    content = bytearray((bundle / WEIGHTS).read_bytes())
    content[500] ^= 1
    (bundle / WEIGHTS).write_bytes(content)
    opened = Bundle.open(bundle)  # the size is the same
    with pytest.raises(BundleError, match=r"weights\.data: sha256"):
        opened.verify_files()
    assert len(opened.problems()) == 1
    refresh_files(bundle).verify_files()


def test_progress_reaches_the_total(bundle: Path) -> None:
    seen: list[tuple[int, int]] = []
    Bundle.open(bundle).verify_files(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1007, 1007)


def test_files_that_the_manifest_does_not_list_are_not_the_bundles(bundle: Path) -> None:
    (bundle / "chat_template.jinja").write_text("planted")
    opened = Bundle.open(bundle)
    assert opened.find("chat_template.jinja") is None
    assert opened.file("config.json") == bundle / "config.json"
    with pytest.raises(BundleError, match="holds no chat_template"):
        opened.file("chat_template.jinja")


def test_an_engine_that_is_not_there_is_named(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.manifest.engine().target == "ort-cpu"
    with pytest.raises(BundleError, match=r"tensorrt; it has ort-cpu"):
        opened.manifest.engine("tensorrt")


# --- writing


def test_an_existing_out_is_refused_without_force(bundle: Path) -> None:
    before = (bundle / "adx.json").read_bytes()
    with pytest.raises(OutputExistsError, match="--force"), BundleWriter(bundle):
        pass
    assert (bundle / "adx.json").read_bytes() == before
    assert names(bundle.parent) == ["out"]


@pytest.mark.parametrize("what", ["file", "folder", "other json", "dangling link"])
def test_force_replaces_bundles_only(tmp_path: Path, what: str) -> None:
    """A mistyped OUT must not cost a user a folder of other things."""
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "dangling link":
        out.symlink_to(tmp_path / "gone/file")
        (tmp_path / "gone").write_text("not a folder")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    if what == "other json":
        (out / "adx.json").write_text('{"name": "something else"}')
    with pytest.raises(UsageError), BundleWriter(out, force=True):
        pass
    assert out.exists() or out.is_symlink()
    assert not list(tmp_path.glob(".*"))


def test_force_leaves_the_bytes_of_a_fresh_export(tmp_path: Path) -> None:
    """No file of the old bundle stays, and nothing is appended to."""
    write(tmp_path / "out", weights=b"old" * 9000)
    with BundleWriter(tmp_path / "out", force=True) as writer:
        fill(writer.folder)
        (writer.folder / "extra.bin").write_bytes(b"e")
        writer.commit(manifest())
    write(tmp_path / "out", force=True)
    write(tmp_path / "fresh")
    files = {p.relative_to(tmp_path / "out"): p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()}
    fresh = {
        p.relative_to(tmp_path / "fresh"): p.stat().st_size for p in (tmp_path / "fresh").rglob("*") if p.is_file()
    }
    assert files == fresh
    assert names(tmp_path) == ["fresh", "out"]


def test_force_takes_an_empty_folder_and_makes_missing_parents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", force=True)
    write(tmp_path / "a/b/out")
    assert names(tmp_path / "a/b") == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_bundle_survives_a_failed_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """Both ways to swap: in one step, and with the old bundle moved aside and back."""
    write(tmp_path / "out", weights=b"old")
    if not exchange:
        monkeypatch.setattr(bundle_swap, "_exchange", lambda first, second: False)
    write(tmp_path / "out", force=True, weights=b"new")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == b"new"
    real = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(target).name == "out" and not str(source).endswith(".old"):
            raise OSError(errno.EIO, "rename failed")
        real(source, target)

    monkeypatch.setattr(bundle_swap, "_exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="rename failed"):
        write(tmp_path / "out", force=True, weights=b"newer")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == b"new"
    Bundle.open(tmp_path / "out").verify_files()
    assert names(tmp_path) == ["out"]


def test_an_exception_leaves_nothing_and_keeps_the_old_bundle(bundle: Path) -> None:
    def work() -> None:
        with BundleWriter(bundle, force=True) as writer:
            fill(writer.folder)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        work()
    Bundle.open(bundle).verify_files()
    assert names(bundle.parent) == ["out"]


def test_a_writer_left_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer.folder)
    assert names(tmp_path) == []


def test_a_manifest_that_names_files_that_were_not_written_is_not_committed(tmp_path: Path) -> None:
    def work() -> None:
        with BundleWriter(tmp_path / "out") as writer:
            (writer.folder / "config.json").write_text("{}")
            writer.commit(manifest())

    with pytest.raises(BundleError, match="does not list"):
        work()
    assert names(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with BundleWriter(tmp_path / "out") as writer:
            fill(writer.folder)
            (writer.folder / "full").symlink_to("/dev/full")
            (writer.folder / "full").write_bytes(b"x" * 10_000)

    with pytest.raises(AdxError, match=r"no space left on the disk .*written and .* free"):
        work()
    assert names(tmp_path) == []


def test_a_full_disk_that_a_library_reports_in_words_is_understood(tmp_path: Path) -> None:
    with pytest.raises(AdxError, match="no space left"), BundleWriter(tmp_path / "out"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_too_little_room_is_said_before_the_work(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not/yet/there", 1)
    with pytest.raises(AdxError, match=r"needs about 1000000000\.00 GB"):
        check_free_space(tmp_path / "out", 10**18)


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The second to finish is told, and removes only its own files."""

    def second_writer(first: BundleWriter) -> None:
        with BundleWriter(tmp_path / "out") as second:
            fill(second.folder)
            assert first.folder.is_dir(), "the workspace of a living writer was taken for a leftover"
            first.commit(manifest())
            second.commit(manifest())

    with BundleWriter(tmp_path / "out") as first:
        fill(first.folder)
        with pytest.raises(OutputExistsError):
            second_writer(first)
    assert names(tmp_path) == ["out"]


SCRIPT = """
import sys, time
from pathlib import Path
from adx.export.bundle import BundleWriter
from adx.export.errors import AdxError
from adx.export.interrupt import interruptible

try:
    with interruptible(), BundleWriter(sys.argv[1], force=True) as writer:
        stream = (writer.folder / "weights.data").open("wb")
        print("writing", flush=True)
        while True:
            stream.write(b"x" * 4096)
            stream.flush()
            time.sleep(0.005)
except AdxError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start_writing(out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("twice", [False, True])
def test_a_signal_in_the_middle_of_writing_leaves_nothing(bundle: Path, number: int, code: int, twice: bool) -> None:
    process = start_writing(bundle)
    assert len(names(bundle.parent)) == 3
    process.send_signal(number)
    if twice:
        process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    # A second one may come after the clean-up, when the process's own handlers are back.
    assert process.returncode in ((code, -number) if twice else (code,))
    assert twice or "Traceback" not in errors
    assert names(bundle.parent) == ["out"]
    Bundle.open(bundle).verify_files()


def test_what_a_killed_process_left_goes_with_the_next_export(bundle: Path) -> None:
    process = start_writing(bundle)
    process.kill()
    process.communicate(timeout=20)
    Bundle.open(bundle).verify_files()  # the good one is as it was
    assert len(names(bundle.parent)) == 3, "a killed process cannot tidy up"
    living = start_writing(bundle.parent / "other")
    (bundle.parent / ".out.adx-mine").mkdir()  # no marker: not adx's
    try:
        write(bundle, force=True)
        left = [name for name in names(bundle.parent) if not name.startswith(".other.")]
        assert left == [".out.adx-mine", "out"]
    finally:
        living.terminate()
        living.communicate(timeout=20)
    assert living.returncode == 143


def test_a_reused_process_number_is_not_taken_for_the_writer(tmp_path: Path) -> None:
    """The marker's start time tells a new process of the same number from the one that died."""
    marker, folder = tmp_path / ".out.adx-abc.owner", tmp_path / ".out.adx-abc"
    folder.mkdir()
    owner = {"host": bundle_swap.platform.node(), "pid": os.getpid(), "started": time.time() - 10**6}
    marker.write_text(json.dumps(owner))
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_workspace_of_another_machine_is_left_alone(tmp_path: Path) -> None:
    """On a shared disk the writer may well be alive over there."""
    (tmp_path / ".out.adx-abc").mkdir()
    (tmp_path / ".out.adx-abc.owner").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 0}))
    write(tmp_path / "out")
    assert names(tmp_path) == [".out.adx-abc", ".out.adx-abc.owner", "out"]


def test_an_old_bundle_that_a_killed_swap_left_aside_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.adx-abc.old")
    (tmp_path / ".out.adx-abc").mkdir()
    (tmp_path / ".out.adx-abc.owner").write_text("{}")
    with pytest.raises(RuntimeError), BundleWriter(tmp_path / "out"):
        raise RuntimeError
    Bundle.open(tmp_path / "out").verify_files()
    assert names(tmp_path) == ["out"]
