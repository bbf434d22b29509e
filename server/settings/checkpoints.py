"""Choice of the drafter checkpoint for a target."""

from dataclasses import replace
from pathlib import Path

import outrider.drafters
from outrider.drafters import networks, registry
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.mtp import checkpoint as mtp
from outrider.drafters.mtp.config import MtpConfig

from ..errors import UserError
from ..model import hub
from ..model.target import Model
from .declared import CHECKPOINT_DRAFTERS
from .settings import Settings

WEIGHTS = Path(outrider.drafters.__file__).parent / "weights"


def with_drafter_path(settings: Settings, model: Model) -> Settings:
    """Return settings with the drafter in place of "auto", and its checkpoint if it needs one; raises UserError."""
    if settings.drafter == "auto" and settings.drafter_path is None:
        settings = replace(settings, drafter="dspark" if settings.model is None else "ngram")
    if settings.drafter not in (*CHECKPOINT_DRAFTERS, "auto"):
        if settings.drafter_path is not None:
            raise UserError(f"--drafter-path goes with --drafter {' or '.join(CHECKPOINT_DRAFTERS)}")
        return settings
    if not settings.parallel.leads:  # the first node drafts
        if settings.drafter == "auto":
            raise UserError("on several nodes, --drafter-path goes with --drafter, the same on each")
        return settings
    if settings.drafter_path:
        folder = find(settings.drafter_path)
    else:
        folder = own_layer(model) if settings.drafter == MtpConfig.kind else shipped(model, settings.drafter)
    if not (folder / "config.json").is_file():
        if settings.drafter_path:
            raise UserError(f"--drafter-path {settings.drafter_path} is no drafter folder: it has no config.json")
        raise UserError(
            f"no {settings.drafter} drafter for {model.name} comes with Outrider; "
            f"train one (outrider train {settings.drafter} --target {model.path} …) and name its folder with "
            "--drafter-path, or use --drafter ngram"
        )
    kind = read_config(folder).kind
    fitting = registry.serving(kind)
    if settings.drafter == "auto":
        settings = replace(settings, drafter=fitting[0])
    if settings.drafter not in fitting:
        article = "an" if kind.startswith("e") else "a"
        raise UserError(f"{folder} holds {article} {kind} drafter; serve it with --drafter {' or '.join(fitting)}")
    return replace(settings, drafter_path=str(folder))


def own_layer(model: Model) -> Path:
    """Return the folder of a model with an MTP layer; raises UserError where it has none that is served."""
    folder = model.folder or hub.cached(model.path)
    if folder is None:
        raise UserError(
            f"{model.name} is not here yet; leave --drafter out: its MTP layer drafts from the next start on"
        )
    try:
        mtp.check_folder(folder)
    except CheckpointError as error:
        raise UserError(f"--drafter mtp: {error}; use --drafter ngram") from None
    return folder


def read_config(folder: Path) -> networks.Config:
    """Return the config of a folder's drafter. Raises UserError if it cannot be read."""
    try:
        return networks.read_config(folder)
    except CheckpointError as error:
        raise UserError(f"the drafter {folder} cannot be used: {error}") from None


def find(wanted: str) -> Path:
    """Return the folder of a drafter given as a folder or a hub name; downloads it once. Raises UserError."""
    folder = Path(wanted).expanduser()
    if folder.exists() or folder.is_absolute() or wanted.startswith((".", "~")) or not hub.NAME.fullmatch(wanted):
        return folder
    from huggingface_hub import snapshot_download

    with hub.hub_errors(wanted, "--drafter-path"):
        return Path(snapshot_download(wanted, allow_patterns=["config.json", "*.safetensors"]))


def shipped(model: Model, drafter: str) -> Path:
    """Return the folder of our own checkpoint for this target, which may be missing."""
    return WEIGHTS / model.name.lower() / (registry.find(drafter).kind or drafter)
