"""Find a checkpoint and say within seconds whether adx can export it; no weight and no torch is loaded here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adx.export.checkpoint_files import (
    StoredTensor,
    named_weight_files,
    read_json,
    stored_tensors,
    weight_files,
)
from adx.export.checkpoint_hub import fetch_text_files, fetch_weights, is_offline, offline_hint
from adx.export.errors import CheckpointError, UnsupportedCheckpointError, UsageError
from adx.export.families import FAMILIES, GGUF_FAMILIES, Family, supported
from adx.export.gguf_header import GGUFHeader, read_gguf_header, refuse_gguf, require_gguf

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that adx can export, its files found and checked.

    Attributes:
        path: the folder that holds it.
        source: what the user named: a folder's name, a hub id or a file's name; never an absolute path.
        revision: the hub's commit, or None.
        kind: how the weights are stored.
        gguf_file: the file's name, for a GGUF.
        config: `config.json`, or a GGUF's scalar metadata.
        weight_files: names of the files that hold the weights.
        weight_bytes: bytes of the weights as they are stored.
        parameters: unique parameters; a tied weight counts once.
        dtype: element type of most of the weights (a GGUF's own name for it, as `Q4_1`).
        tied: whether the head shares the embedding's weight.
        architecture: the class with the language-model head, as `LlamaForCausalLM`.
        model_type: key of `adx.export.families.FAMILIES`.
        trust_remote_code: whether code that the checkpoint brings may be run.
    """

    path: Path
    source: str
    revision: str | None
    kind: Literal["safetensors", "gguf"]
    gguf_file: str | None
    config: Mapping[str, Any]
    weight_files: tuple[str, ...]
    weight_bytes: int
    parameters: int
    dtype: str
    tied: bool
    architecture: str
    model_type: str
    trust_remote_code: bool = False

    @property
    def family(self) -> Family:
        """The row of the families' table."""
        return FAMILIES[self.model_type]


def resolve(
    model: str, *, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Find a checkpoint and classify it.

    Args:
        model: a local folder, a `.gguf` file, or, where no such path exists, a hub id.
        revision: a branch, tag or commit of the hub; for a hub id only.
        offline: use the hub's cache only.
        trust_remote_code: allow code that the checkpoint brings.

    Raises:
        UsageError: `model` is none of these, or `revision` is given for a local path.
        CheckpointError: it is not there, incomplete or damaged.
        UnsupportedCheckpointError: it is whole, but adx cannot export it.
        BackendError: a `.gguf` file, and the packages that read it are missing.
    """
    if not model.strip():
        raise UsageError("MODEL is empty: give a Hugging Face folder, a .gguf file, or a hub id")
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise UsageError(f"--revision {revision} has no effect on the local path {model}: leave it out")
        return _local(path, trust_remote_code=trust_remote_code)
    if _looks_local(model):
        raise CheckpointError(f"there is no folder or file {model}: check the path")
    return _from_hub(model, revision, offline=is_offline(offline), trust_remote_code=trust_remote_code)


def _local(path: Path, *, trust_remote_code: bool) -> Checkpoint:
    if path.is_dir():
        return _from_folder(path, path.resolve().name, None, trust_remote_code=trust_remote_code)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path)
    raise UsageError(f"{path} is a file, but neither a Hugging Face folder nor a .gguf file")


def _looks_local(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1 or model.endswith((".gguf", "/"))


def _from_hub(repo: str, revision: str | None, *, offline: bool, trust_remote_code: bool) -> Checkpoint:
    folder = fetch_text_files(repo, revision, offline=offline, code=trust_remote_code)
    if offline and not (folder / "config.json").is_file():
        raise CheckpointError(offline_hint(repo, "config.json"))
    _classify(folder, trust_remote_code=trust_remote_code)  # before gigabytes are fetched
    files = named_weight_files(folder)
    if any(not (folder / file).is_file() for file in files):
        fetch_weights(repo, folder.name, files, offline=offline)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and offline:
        raise CheckpointError(offline_hint(repo, missing[0]))
    if missing:
        raise UnsupportedCheckpointError(
            f"{repo} has no {missing[0]} on the hub, and adx reads safetensors weights only: take a revision or a copy "
            "of the model that has them"
        )
    return _from_folder(folder, repo, folder.name, trust_remote_code=trust_remote_code)


def _from_folder(folder: Path, source: str, revision: str | None, *, trust_remote_code: bool) -> Checkpoint:
    config, family = _classify(folder, trust_remote_code=trust_remote_code)
    files = weight_files(folder)
    tensors = stored_tensors(folder, files)
    dtype = _main_dtype(tensors)
    if dtype not in _DTYPES:
        raise UnsupportedCheckpointError(
            f"{source} stores its weights as {dtype}: adx quantizes itself, so give it the unquantized checkpoint"
        )
    tied = bool(config.get("tie_word_embeddings", family.tied_by_default))
    return Checkpoint(
        path=folder,
        source=source,
        revision=revision,
        kind="safetensors",
        gguf_file=None,
        config=config,
        weight_files=files,
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        parameters=_parameters(tensors, family, tied),
        dtype=_DTYPES[dtype],
        tied=tied,
        architecture=family.architecture,
        model_type=family.model_type,
        trust_remote_code=trust_remote_code,
    )


def _from_gguf(path: Path) -> Checkpoint:
    require_gguf()
    header = read_gguf_header(path)
    refuse_gguf(header, path.name)
    family = GGUF_FAMILIES[header.architecture]
    return Checkpoint(
        path=path.parent,
        source=path.name,
        revision=None,
        kind="gguf",
        gguf_file=path.name,
        config=header.metadata,
        weight_files=(path.name,),
        weight_bytes=sum(tensor.nbytes for tensor in header.tensors),
        parameters=sum(tensor.elements for tensor in header.tensors),
        dtype=_main_dtype(header.tensors),
        tied=_gguf_tied(header),
        architecture=family.architecture,
        model_type=family.model_type,
    )


def _gguf_tied(header: GGUFHeader) -> bool:
    return all(tensor.name != "output.weight" for tensor in header.tensors)


def _classify(folder: Path, *, trust_remote_code: bool) -> tuple[dict[str, Any], Family]:
    """A folder's configuration and its row in the families' table.

    Raises:
        CheckpointError: there is no configuration, or it is damaged.
        UnsupportedCheckpointError: adx cannot export such a checkpoint.
    """
    _refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(_without_config(folder))
    config = read_json(folder / "config.json")
    family = _family(config, folder.name)
    _refuse_quantized(config, folder)
    _refuse_remote_code(config, folder.name, trust_remote_code=trust_remote_code)
    if config.get("add_cross_attention"):
        raise UnsupportedCheckpointError(
            f"{folder.name} is the decoder of an encoder-decoder model (add_cross_attention), which adx cannot export"
        )
    return config, family


def _refuse_adapter(folder: Path) -> None:
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    config = read_json(path)
    base = config.get("base_model_name_or_path") or "its base model"
    raise UnsupportedCheckpointError(
        f"{folder.name} is a {config.get('peft_type', 'PEFT')} adapter of {base}, not a whole model: merge it first "
        "with peft (AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(OUT)), then "
        "export OUT"
    )


def _without_config(folder: Path) -> str:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"{folder} has no config.json, but holds {ggufs[0]}: give that file's path as MODEL"
    if (folder / "adx.json").is_file():
        return f"{folder} is an adx bundle, not a checkpoint: give the model that it was exported from"
    return f"{folder} has no config.json, so it is not a Hugging Face checkpoint: give the folder that holds it"


def _family(config: Mapping[str, Any], name: str) -> Family:
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or config.get("is_encoder_decoder"):
        raise UnsupportedCheckpointError(
            f"{name} is {_what(config)} of type {model_type!r}, which adx cannot export; supported are: {supported()}"
        )
    architectures = config.get("architectures") or [family.architecture]
    if not {family.architecture, family.base_architecture} & set(map(str, architectures)):
        raise UnsupportedCheckpointError(
            f"{name} is a {architectures[0]}, which has no language-model head; adx exports {family.architecture}"
        )
    return family


def _what(config: Mapping[str, Any]) -> str:
    if config.get("is_encoder_decoder"):
        return "an encoder-decoder model"
    if any(key in config for key in ("vision_config", "image_size", "audio_config", "vision_tower")):
        return "a vision or audio model"
    if "auto_map" in config:
        return "a model with its own code (which --trust-remote-code does not make exportable)"
    return "a model"


def _refuse_quantized(config: Mapping[str, Any], folder: Path) -> None:
    found = config.get("quantization_config") or config.get("compression_config")
    beside = [name for name in ("quantize_config.json", "hf_quant_config.json") if (folder / name).is_file()]
    if not found and not beside:
        return
    details = found if isinstance(found, dict) else {}
    method = details.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in details else "by an unnamed method")
    raise UnsupportedCheckpointError(
        f"{folder.name} is quantized already ({method}): adx quantizes itself, so give it the unquantized checkpoint"
    )


def _refuse_remote_code(config: Mapping[str, Any], name: str, *, trust_remote_code: bool) -> None:
    auto_map = config.get("auto_map")
    if not auto_map:
        return
    targets = [str(target) for target in (auto_map.values() if isinstance(auto_map, dict) else [auto_map])]
    if any("--" in target for target in targets):
        raise UnsupportedCheckpointError(
            f"{name} takes its code from another repository ({targets[0]}), which adx does not fetch: put the code "
            "beside the checkpoint"
        )
    if not trust_remote_code:
        raise UnsupportedCheckpointError(
            f"{name} brings code of its own ({targets[0]}), which adx does not run: read it, then allow it with "
            "--trust-remote-code; or, where transformers' own class computes the same, delete auto_map from config.json"
        )


def _main_dtype(tensors: tuple[StoredTensor, ...]) -> str:
    """The element type that holds the most elements."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.elements
    if not counts:
        raise CheckpointError("the weight files hold no tensor: download them again")
    return counts.most_common(1)[0][0]


def _parameters(tensors: tuple[StoredTensor, ...], family: Family, tied: bool) -> int:
    return sum(
        tensor.elements
        for tensor in tensors
        if not tensor.name.endswith(family.buffers) and not (tied and tensor.name == family.head_weight)
    )
