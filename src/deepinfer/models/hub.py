"""From a name to a local folder: an embedded checkpoint, a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import os
import re
from importlib import resources
from pathlib import Path

from deepinfer.core import _checks as checks
from deepinfer.core.errors import CheckpointMissing, ConfigError, HubOffline

__all__ = ["EMBEDDED", "INDEX_NAME", "resolve_checkpoint"]

EMBEDDED = ("nano",)
"""Names of the checkpoints inside the package; `"./nano"` is a folder of that name."""

INDEX_NAME = "model.safetensors.index.json"
"""The file that says which shard holds which tensor."""

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ("*.json", "*.safetensors", "*.md", "LICENSE*")
_TRUE = ("1", "ON", "YES", "TRUE")


def resolve_checkpoint(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    offline: bool | None = None,
    *,
    progress: bool | None = None,
) -> Path:
    """Finds a checkpoint, and downloads it when it is a hub repository that is not cached.

    A local folder or an embedded checkpoint never touches the network. A name that could be either a path or a
    repository (`a/b`) is a path when it exists, or when the folder `a` does.

    Args:
        path_or_repo: "nano", a folder, or a repository "owner/name".
        revision: Branch, tag or commit of a repository; None for its default branch.
        offline: True never uses the network; None does as HF_HUB_OFFLINE says.
        progress: Whether downloads draw bars; None for on a terminal or in a notebook only.

    Returns:
        The local folder.

    Raises:
        CheckpointMissing: There is no such folder (near names are given), repository or revision.
        HubOffline: A needed file is not cached and the network is off or does not answer; names the file.
        ConfigError: A revision was given with a local folder, or the name is no text.
    """
    text = _as_text(path_or_repo)
    embedded = isinstance(path_or_repo, str) and text in EMBEDDED
    path = Path(str(resources.files("deepinfer") / "assets" / text)) if embedded else _expand(text)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # no permission, a name too long, a network file system that is gone
        raise CheckpointMissing(
            f"{checks.show(text)} cannot be looked at: {error.strerror}.", path=path
        ) from error
    if is_folder:
        if revision is not None:
            raise ConfigError(
                f"revision is {revision!r}, but {text!r} is a local folder, which has none. Leave it out.",
                field="revision",
                value=revision,
            )
        return path
    if exists:
        raise CheckpointMissing(
            f"{path} is a file. Give the folder that holds config.json and the weights: {path.parent}",
            path=path,
        )
    if embedded or not _is_repository(path_or_repo, path):
        raise _no_such_folder(text, path)
    return _download(text, revision, _is_offline() if offline is None else offline, progress)


def _as_text(given: object) -> str:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if isinstance(text, str) and text.strip():
        return text
    message = (
        f"the checkpoint is {checks.show(given)} ({type(given).__name__}); give "
        f"{', '.join(repr(name) for name in EMBEDDED)}, a folder, or a repository 'owner/name'."
    )
    if isinstance(
        text, str
    ):  # an empty variable of a script; as a path it would be the working folder
        raise CheckpointMissing(message, path=text)
    raise ConfigError(message, field="path_or_repo", value=given)


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # there is no such user, or no home folder is known
        raise CheckpointMissing(
            f"{checks.show(text)} starts at a home folder that is not known here ({error}); give the whole path.",
            path=text,
        ) from error


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


def _is_repository(given: str | os.PathLike[str], path: Path) -> bool:
    return isinstance(given, str) and bool(_REPO_ID.fullmatch(given)) and not path.parent.exists()


def _no_such_folder(text: str, path: Path) -> CheckpointMissing:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    wanted = path.relative_to(parent).parts[0]
    try:
        here = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    except OSError:
        here = []
    near = [str(parent / name) for name in difflib.get_close_matches(wanted, here, n=3)]
    near += difflib.get_close_matches(text, EMBEDDED, n=1)
    hint = (
        f"Did you mean {' or '.join(repr(name) for name in near)}?"
        if near
        else (
            f"Give {', '.join(repr(name) for name in EMBEDDED)}, a checkpoint folder, or a repository 'owner/name'."
        )
    )
    where = "" if wanted == path.name else f" ({parent} has no folder {wanted!r})"
    return CheckpointMissing(f"There is no folder {text!r}{where}. {hint}", path=path)


def _download(repo: str, revision: str | None, offline: bool, progress: bool | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_FILES),
            local_files_only=offline,
            tqdm_class=_bars(progress),
        )
    except errors.RevisionNotFoundError as error:
        raise CheckpointMissing(
            f"{repo} has no revision {revision!r}. Check the branch, tag or commit.", path=repo
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointMissing(
            f"There is no folder and no hub repository {repo!r} that you may read. Check the name; "
            f"for a private or gated one log in with `hf auth login`.",
            path=repo,
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        file = _first_uncached(repo, revision)
        why = (
            "the network is off (HF_HUB_OFFLINE or offline=True)"
            if offline
            else f"the hub does not answer ({error})"
        )
        raise HubOffline(
            f"{file} of {repo}{at} is not in the local cache, and {why}. "
            f"Run once with the network, or give a local folder.",
            repo=repo,
            file=file,
        ) from error
    return _check_complete(Path(folder), repo, at, offline)


def _check_complete(folder: Path, repo: str, at: str, offline: bool) -> Path:
    """A cached snapshot can lack files that an interrupted or partial download never fetched."""
    for name in _wanted_files(folder):
        if not (folder / name).is_file():
            if offline:
                raise HubOffline(
                    f"{name} of {repo}{at} is not in the local cache, and the network is off "
                    f"(HF_HUB_OFFLINE or offline=True). Run once with the network.",
                    repo=repo,
                    file=name,
                )
            raise CheckpointMissing(
                f"{repo}{at} has no {name}; it is not a checkpoint.", path=folder / name
            )
    return folder


def _wanted_files(folder: Path) -> list[str]:
    import json

    wanted = ["config.json"]
    try:
        index = json.loads((folder / INDEX_NAME).read_text("utf-8"))
        wanted += sorted({str(name) for name in index["weight_map"].values()})
    except FileNotFoundError:
        if not any(folder.glob("*.safetensors")):
            wanted.append("model.safetensors")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # the reader of the index reports this with its reason
    return wanted


def _first_uncached(repo: str, revision: str | None) -> str:
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", INDEX_NAME, "model.safetensors"):
        if not isinstance(try_to_load_from_cache(repo, name, revision=revision), str):
            return name
    return "a file"


def _bars(progress: bool | None) -> type:
    """The hub client's bar, drawn when asked to; None draws on a terminal or in a notebook only."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,unused-ignore]
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs["disable"] = None if progress is None else not progress
            super().__init__(*args, **kwargs)

    return Bar
