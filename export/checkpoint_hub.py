"""Fetch a model from the Hugging Face hub, or find it in the cache; no pickle is ever fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adx.export.errors import CheckpointError, UsageError

# Everything but the weights. Python files are fetched only where the user trusts them.
TEXT_FILES = ("*.json", "tokenizer*", "*.model", "*.jinja", "additional_chat_templates/*", "merges.txt", "vocab.txt")
CODE_FILES = ("*.py",)
_NEVER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5", "onnx/*", "original/*")


def is_offline(offline: bool) -> bool:
    """Whether the hub may not be asked: by option, or by HF_HUB_OFFLINE as the hub's own library reads it."""
    from huggingface_hub import constants

    return offline or bool(constants.HF_HUB_OFFLINE)


def fetch_text_files(repo: str, revision: str | None, *, offline: bool, code: bool) -> Path:
    """Configuration and tokenizer of a hub model.

    Returns:
        The snapshot's folder, whose name is the commit.

    Raises:
        UsageError: `repo` is neither a folder nor a hub id.
        CheckpointError: it is not there, needs a login, or the hub cannot be reached.
    """
    return _fetch(repo, revision, (*TEXT_FILES, *(CODE_FILES if code else ())), offline=offline)


def fetch_weights(repo: str, revision: str, files: Sequence[str], *, offline: bool) -> None:
    """Fetch the named weight files of a hub model beside its text files.

    Raises:
        CheckpointError: they cannot be fetched.
    """
    _fetch(repo, revision, files, offline=offline)


def offline_hint(repo: str, missing: str) -> str:
    """What to say when a file is not in the cache and the hub may not be asked."""
    return (
        f"adx is offline (--offline or HF_HUB_OFFLINE), and {missing} of {repo} is not in the cache: run "
        f"`hf download {repo}` once with a network, or give a local folder"
    )


def _fetch(repo: str, revision: str | None, patterns: Sequence[str], *, offline: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f"{repo} at revision {revision}" if revision else repo
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_NEVER),
                local_files_only=offline,
            )
        )
    except errors.HFValidationError as error:
        raise UsageError(
            f"{repo!r} is neither a local folder, a .gguf file, nor a hub id (as owner/name): check the path"
        ) from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no local folder {repo!r} and no such model on the hub (or it is private): check the name, or "
            "log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r} on the hub") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if offline:
            missing = "config.json" if "*.json" in patterns else patterns[0]
            raise CheckpointError(f"there is no local folder {repo!r}; {offline_hint(repo, missing)}") from error
        raise CheckpointError(f"the hub cannot be reached, and {at} is not in the cache: check the network") from error
    except Exception as error:  # a connection error's class is the HTTP library's, which varies with the hub's version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"the hub did not give {at}: {lines[0]}") from error
