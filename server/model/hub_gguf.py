"""GGUF files on the Hugging Face hub, by the names that llama.cpp's users write: `hf.co/OWNER/REPO:Q4_K_M`."""

import re
from pathlib import Path

from ..errors import UserError
from . import hub
from .gguf_file import PART, stem_of

NAME = re.compile(r"(?P<host>(https://)?(hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]+?)(:(?P<type>[\w.-]+))?")
PREFERRED = "Q4_K_M"
"""llama.cpp's default type, taken if the name gives no type and the repository has it."""
NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files of a repository that are no model: image encoders, and statistics for quantising."""


def names_gguf(name: str) -> bool:
    """Return True for a name with the hub's address or with a type: both ask for a GGUF file."""
    match = NAME.fullmatch(name)
    return match is not None and (match["host"] or match["type"]) is not None


def fetch(name: str) -> Path:
    """Fetch the file of a name, with all its parts. Raises UserError, in one line, where there is none.

    Without a connection the hub's cache is searched.
    """
    from huggingface_hub import hf_hub_download

    match = NAME.fullmatch(name)
    assert match is not None
    with hub.hub_errors(match["repo"], "--model"):
        files = [
            file for file in _files(match["repo"]) if file.lower().endswith(".gguf") and not NO_MODELS.search(file)
        ]
        chosen = _choose(match["repo"], files, match["type"])
        paths = [Path(hf_hub_download(match["repo"], file)) for file in chosen]
        return paths[0]


def _files(repo: str) -> list[str]:
    """Return the names of a repository's files."""
    from httpx import TransportError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().list_repo_files(repo)
    except (OfflineModeIsEnabled, TransportError):
        folder = Path(snapshot_download(repo, local_files_only=True))
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _choose(repo: str, files: list[str], kind: str | None) -> list[str]:
    """Return the files of one model, parts in order; kind: the requested type."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        models.setdefault(str(Path(file).with_name(stem_of(Path(file)))), []).append(file)
    if not models:
        raise UserError(f"{repo} has no GGUF file; if it has safetensors, give --model {repo}")
    wanted = re.compile(rf"(^|[-_./]){re.escape(kind or PREFERRED)}(/|$)", re.IGNORECASE)
    fitting = [model for model in models if wanted.search(model)]
    if kind and not fitting:
        raise UserError(f"{repo} has no GGUF file of type {kind}; it has {', '.join(models)}")
    chosen = models[(fitting or list(models))[0]]
    if (part := PART.fullmatch(Path(chosen[0]).name)) and len(chosen) != int(part["count"]):
        raise UserError(f"{repo} has {len(chosen)} of the {int(part['count'])} parts of {chosen[0]}")
    return chosen
