"""Find a model's drafters: in its folder, next to its folder, and public ones in the hub's cache.

`--drafter auto` takes the first that fits, without a download; `outrider drafters` shows them all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.drafters import networks, public, registry
from outrider.drafters.block.config import BLOCK_KINDS, BlockConfig
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.mtp import checkpoint as mtp

from ..model import families, hub
from ..model.target import Model
from .checkpoints import shipped
from .declared import CHECKPOINT_DRAFTERS
from .settings import Settings

SNAPSHOT = "models--"
"""Beginning of a repository's folder in the hub's cache."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that may fit a model.

    name: repository, or folder. kind: as `registry.serving` takes it; "" if the folder does not say. origin: the place
    it was found in, or the page that names it. folder: None if it is not on this machine. obstacle: the reason why
    it does not fit; "" if none is known, from its kind or, on this machine, its config.
    """

    name: str
    kind: str
    origin: str
    folder: Path | None
    obstacle: str = ""

    @property
    def fits(self) -> bool:
        return self.folder is not None and not self.obstacle


def candidates(settings: Settings, model: Model) -> list[Candidate]:
    """Return all drafters of a model, by preference: in its folder, public in the registry's order, its MTP layer."""
    if settings.model is None:
        folders = dict.fromkeys(shipped(model, name) for name in CHECKPOINT_DRAFTERS)
        origin = "comes with Outrider"
        return [_in_folder(folder, folder.name, origin, settings, model) for folder in folders if folder.is_dir()]
    within = sorted(path.parent for path in model.folder.glob("*/config.json")) if model.folder else []
    listed = [_in_folder(folder, str(folder), "in the model's folder", settings, model) for folder in within]
    names = list(registry.DRAFTERS)  # in the order of preference
    for drafter in sorted(_public(settings, model), key=lambda one: names.index(registry.serving(one.kind)[0])):
        here, origin = _here(drafter.repo, settings, model)
        if here is None:
            obstacle = _unserved(drafter.kind, settings, model)
            listed.append(Candidate(drafter.repo, drafter.kind, drafter.source, None, obstacle))
        else:
            listed.append(_in_folder(here, drafter.repo, origin, settings, model))
    whole = model.folder or hub.cached(model.path)
    if whole is not None and mtp.is_carried(whole):
        listed.append(_in_folder(whole, str(whole), "in the model's checkpoint", settings, model))
    return listed


def with_found_drafter(settings: Settings, model: Model, say: Callable[[str], None] = lambda line: None) -> Settings:
    """Replace `auto` by a drafter for a model that ships without one. say: receives the reason, in one line.

    Reads the drafter's weights first: a server with a damaged drafter would not start.
    """
    if settings.drafter != "auto" or settings.drafter_path is not None or settings.model is None:
        return settings
    if settings.parallel.nnodes > 1:  # all of them have to find the same drafter
        return settings
    listed = candidates(settings, model)
    refused = []
    for each in listed:
        obstacle = each.obstacle or (damage(each.folder, model) if each.folder else "")
        if each.folder is not None and not obstacle:
            name = registry.serving(each.kind)[0]
            say(f"Drafter {name}: {each.name}, {each.origin}, fits {model.name} (--drafter ngram does without)")
            return replace(settings, drafter=name, drafter_path=str(each.folder))
        if obstacle:
            refused.append(f"{each.name} does not fit: {obstacle}")
    elsewhere = [each.name for each in listed if each.folder is None and not each.obstacle]
    reason = f"no drafter of {model.name} is here"
    if elsewhere:
        reason += f"; public: {elsewhere[0]} (--drafter-path fetches it; all: outrider drafters {settings.model})"
    elif refused:
        reason += f"; {refused[0]}"
    say(f"Drafter {'untrained' if settings.learn else 'ngram'}: {reason}")
    return settings


def _public(settings: Settings, model: Model) -> Iterable[public.PublicDrafter]:
    """Return public drafters for each name of a model: its own, the requested one, its repository in the cache."""
    names = [model.name, str(settings.model)]
    if model.folder is not None and model.folder.parent.name == "snapshots":
        names.append(model.folder.parents[1].name.removeprefix(SNAPSHOT).replace("--", "/"))
    return dict.fromkeys(drafter for name in names for drafter in public.drafting_for(name))


def _here(repo: str, settings: Settings, model: Model) -> tuple[Path | None, str]:
    """Return a repository's folder, next to the model or in the hub's cache, and its place in words; None without."""
    place = Path(str(settings.model)).expanduser().parent if model.folder is not None else None
    if place is not None:
        for folder in (place / repo.rpartition("/")[2], place / repo, place.parent / repo):
            if (folder / "config.json").is_file():
                return folder.resolve(), f"in {folder.parent}"
    return hub.cached(repo), "in the hub's cache"


def _in_folder(folder: Path, name: str, origin: str, settings: Settings, model: Model) -> Candidate:
    kind = ""
    try:
        config = networks.read_config(folder)
        kind = config.kind
        networks.check_target(folder, model.config)
        obstacle = _unserved(kind, settings, model)
        if settings.learn and (what := networks.not_trained(config)):
            obstacle = obstacle or f"--learn does not train {what}"
        if not obstacle and isinstance(config, BlockConfig) and config.gamma < settings.gamma:
            obstacle = f"it drafts {config.gamma} tokens at most; say --gamma {config.gamma}"
    except (CheckpointError, OSError, ValueError) as error:
        obstacle = " ".join(str(error).split())
    return Candidate(name, kind, origin, folder, obstacle)


def _unserved(kind: str, settings: Settings, model: Model) -> str:
    """Return the reason why a kind of drafter does not work with this model and these settings; "" if it does."""
    architecture = next(iter(model.config.get("architectures") or ()), "")
    if settings.learns_per_owner and kind not in BLOCK_KINDS:
        return f"--learn-per {settings.learn_per} trains {' and '.join(BLOCK_KINDS)} alone"
    reads = registry.find(registry.serving(kind)[0]).needs_hidden_states
    if reads and architecture not in families.SHOWING:
        return f"SGLang shows drafters no hidden states of {architecture}"
    return ""


def damage(folder: Path, model: Model) -> str:
    """Return the reason why a drafter's weights cannot be used, "" if they can; reads them."""
    try:
        networks.check(folder, model.config)
    except (CheckpointError, OSError, ValueError) as error:
        return " ".join(str(error).split())
    return ""
