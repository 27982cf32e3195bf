"""A plan is used only where its record says so: altered, truncated, exchanged and foreign ones are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adx.engines.plan_record import (
    PlanOptions,
    PlanRecord,
    check_plan,
    file_sha256,
    from_json,
    record_path,
    to_json,
    write_record,
)
from adx.engines.profiles import ShapeProfile
from adx.engines.tensorrt_build import PlanFacts
from adx.export.errors import AdxError, BackendError, BundleError
from adx.export.manifest import Limits

CONTENT = bytes(range(256)) * 40
GRAPH, WEIGHTS = hashlib.sha256(b"graph").hexdigest(), hashlib.sha256(b"weights").hexdigest()
REBUILD = "adx compile bundle --target tensorrt-rtx --sm sm89"
HERE: dict[str, str] = {
    "library": "tensorrt-rtx",
    "library_version": "1.7.1.116",
    "compute_capability": "sm89",
    "graph_sha256": GRAPH,
    "weights_sha256": WEIGHTS,
    "rebuild": REBUILD,
}


def facts() -> PlanFacts:
    return PlanFacts(
        bytes=len(CONTENT),
        seconds=7.0,
        parse_seconds=0.2,
        layers={"MATRIX_MULTIPLY": 211, "KV_CACHE_UPDATE": 60},
        precisions={"HALF": 271},
        kv_cache_updates=60,
        attentions=30,
        attentions_decomposed=0,
        plugins=0,
        weights_bytes=269_624_960,
        scratch_bytes=None,
        activation_bytes=13_008_896,
        peak_rss_mb=1400.5,
        warnings=("Unused Input: row_lengths",),
    )


def record() -> PlanRecord:
    shapes = {"input_ids": ((1, 1), (1, 1), (4, 16)), "write_indices": ((1,), (1,), (4,))}
    return PlanRecord(
        library="tensorrt-rtx",
        library_version="1.7.1.116",
        cuda="13.4",
        compute_capability="sm89",
        hardware_compatible=False,
        version_compatible=False,
        phase="decode",
        limits=Limits(4, 1024, 2048),
        profiles=(ShapeProfile("chunk", shapes),),
        graph_sha256=GRAPH,
        weights_sha256=WEIGHTS,
        plan_sha256=hashlib.sha256(CONTENT).hexdigest(),
        plan_bytes=len(CONTENT),
        facts=facts(),
        options=PlanOptions(opt_level=None, workspace_bytes=1 << 30, refit=False, strip=False),
        adx_version="0.1.0",
    )


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of bytes that no library reads, and its record."""
    path = tmp_path / "decode.plan"
    path.write_bytes(CONTENT)
    write_record(path, record())
    return path


def refused(kind: type[AdxError], plan: Path, **here: str) -> str:
    """The message of the refusal, after what every one of them must hold."""
    with pytest.raises(kind) as caught:
        check_plan(plan, **{**HERE, **here})
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith("decode.plan cannot be used: ")
    assert ". Built with: " in message
    assert f". Found: {here.get('library', 'tensorrt-rtx')} " in message
    assert message.endswith(f". Build it again: {REBUILD}")
    assert "\n" not in message
    return message


def rewrite(plan: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record's JSON without its seal, as an editor would."""
    path = record_path(plan)
    keys = json.loads(path.read_text())
    change(keys)
    path.write_text(json.dumps(keys))


def test_a_record_is_read_back_as_it_was_written(plan: Path) -> None:
    assert record_path(plan).name == "decode.plan.json"
    assert check_plan(plan, **HERE) == record()
    assert from_json(to_json(record()), "record") == record()
    assert file_sha256(plan) == hashlib.sha256(CONTENT).hexdigest()


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of every scalar in JSON."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


LEAVES = leaves(json.loads(to_json(record())))


def other(value: Any) -> Any:
    """Another value of the same type, which is as likely."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if value is None:
        return 1
    return value.replace("1", "2") if "1" in value else value + "x"


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
def test_a_field_altered_in_the_record_is_noticed(plan: Path, path: tuple[str | int, ...]) -> None:
    """Each one decides where the plan runs or what is told of it, so none may be changed unseen."""

    def change(keys: dict[str, Any]) -> None:
        place: Any = keys
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = other(place[path[-1]])

    rewrite(plan, change)
    message = refused(BundleError, plan)
    assert "its record is damaged (decode.plan.json" in message
    assert "Built with: unknown" in message


@pytest.mark.parametrize("key", sorted(json.loads(to_json(record()))))
def test_a_key_that_is_missing_is_noticed(plan: Path, key: str) -> None:
    rewrite(plan, lambda keys: keys.pop(key))
    refused(BundleError, plan)


def test_a_key_that_is_unknown_is_noticed(plan: Path) -> None:
    rewrite(plan, lambda keys: keys.update(more=1))
    assert "'more'" in refused(BundleError, plan)


def test_a_record_of_another_schema_is_refused_with_both_versions(plan: Path) -> None:
    rewrite(plan, lambda keys: keys.update(schema_version=2))
    assert "schema version 2, and this adx reads 1" in refused(BundleError, plan)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1, "a": 2}', "\x00"])
def test_a_record_that_is_no_record_is_refused(plan: Path, text: str) -> None:
    record_path(plan).write_text(text)
    assert "its record is damaged" in refused(BundleError, plan)


def test_a_record_that_is_no_text_is_refused(plan: Path) -> None:
    record_path(plan).write_bytes(b"\xff\xfe\x00")
    assert "decode.plan.json cannot be read" in refused(BundleError, plan)


def test_a_missing_record_is_named(plan: Path) -> None:
    record_path(plan).unlink()
    assert "its record decode.plan.json is missing" in refused(BundleError, plan)


def test_a_missing_plan_is_said_to_be_that(plan: Path) -> None:
    plan.unlink()
    message = refused(BundleError, plan)
    assert "it cannot be read (No such file" in message
    assert "Built with: tensorrt-rtx 1.7.1.116, sm89, CUDA 13.4" in message


def test_a_truncated_plan_is_refused_with_both_sizes(plan: Path) -> None:
    plan.write_bytes(CONTENT[:-1])
    assert f"it has {len(CONTENT) - 1} bytes, its record says {len(CONTENT)}" in refused(BundleError, plan)


@pytest.mark.parametrize("fault", ["one bit", "other content"])
def test_an_exchanged_plan_of_the_same_size_is_refused(plan: Path, fault: str) -> None:
    """The library runs what is in a plan, so nothing else may be handed to it."""
    content = bytearray(CONTENT)
    content[1000] ^= 1
    plan.write_bytes(bytes(content) if fault == "one bit" else bytes(len(CONTENT)))
    assert "its content is not that of its record" in refused(BundleError, plan)


def test_plans_that_were_swapped_are_refused(plan: Path) -> None:
    """The record of prefill beside the plan of decode, and the other way round."""
    prefill = plan.with_name("prefill.plan")
    prefill.write_bytes(CONTENT[::-1])
    digest = hashlib.sha256(CONTENT[::-1]).hexdigest()
    write_record(prefill, dataclasses.replace(record(), phase="prefill", plan_sha256=digest))
    plan.write_bytes(CONTENT[::-1])
    assert "its content is not that of its record" in refused(BundleError, plan)


@pytest.mark.parametrize("what", ["graph", "weights"])
def test_a_plan_of_another_model_is_refused(plan: Path, what: str) -> None:
    digest = hashlib.sha256(b"other").hexdigest()
    message = refused(BundleError, plan, **{f"{what}_sha256": digest})
    assert f"it was built from another {what} than the bundle's" in message
    assert digest[:12] in message


def test_a_plan_of_another_library_is_refused(plan: Path) -> None:
    message = refused(BackendError, plan, library="tensorrt", library_version="11.0.0")
    assert "it is a plan of tensorrt-rtx, and tensorrt cannot run it" in message
    assert "Found: tensorrt 11.0.0, sm89" in message


@pytest.mark.parametrize("version", ["1.7.1.117", "1.8.0.1", "2.0.0.0", "1.7.1"])
def test_another_release_is_refused(plan: Path, version: str) -> None:
    message = refused(BackendError, plan, library_version=version)
    assert "it runs in its own release only" in message
    assert f"Built with: tensorrt-rtx 1.7.1.116, sm89, CUDA 13.4. Found: tensorrt-rtx {version}, sm89." in message


@pytest.mark.parametrize("capability", ["sm86", "sm90", "sm120"])
def test_another_gpu_is_refused(plan: Path, capability: str) -> None:
    message = refused(BackendError, plan, compute_capability=capability)
    assert "it runs on that compute capability only" in message
    assert f"Found: tensorrt-rtx 1.7.1.116, {capability}" in message


def test_a_version_compatible_plan_runs_in_its_major_version(plan: Path) -> None:
    compatible = dataclasses.replace(record(), version_compatible=True)
    write_record(plan, compatible)
    for version in ("1.7.1.116", "1.9.0.4"):
        assert check_plan(plan, **{**HERE, "library_version": version}) == compatible
    assert "its major version" in refused(BackendError, plan, library_version="2.0.0.0")


def test_a_hardware_compatible_plan_runs_from_ampere_on(plan: Path) -> None:
    """TensorRT's rule for its level `AMPERE_PLUS`; 120 is more than 80, though less as text."""
    compatible = dataclasses.replace(record(), hardware_compatible=True)
    write_record(plan, compatible)
    for capability in ("sm80", "sm89", "sm90", "sm120"):
        assert check_plan(plan, **{**HERE, "compute_capability": capability}) == compatible
    assert "it runs from sm80 on" in refused(BackendError, plan, compute_capability="sm75")


@pytest.mark.parametrize(
    "changes",
    [{"compute_capability": "8.9"}, {"plan_sha256": "abc"}, {"graph_sha256": GRAPH.upper()}, {"phase": "train"}],
    ids=str,
)
def test_a_record_with_an_impossible_value_is_refused_though_sealed(plan: Path, changes: dict[str, Any]) -> None:
    write_record(plan, dataclasses.replace(record(), **changes))
    assert "its record is damaged" in refused(BundleError, plan)


def test_damage_is_told_before_a_difference_of_releases(plan: Path) -> None:
    """Building again is the remedy for both, but a damaged file must not be taken for an old one."""
    plan.write_bytes(b"short")
    assert "bytes, its record says" in refused(BundleError, plan, library_version="9.9", compute_capability="sm75")


def test_a_record_is_replaced_whole(plan: Path) -> None:
    write_record(plan, dataclasses.replace(record(), adx_version="0.2.0"))
    assert check_plan(plan, **HERE).adx_version == "0.2.0"
    assert sorted(path.name for path in plan.parent.iterdir()) == ["decode.plan", "decode.plan.json"]
