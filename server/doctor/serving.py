"""Checks of a server's model, drafter, memory, profile and address, as its flags set them."""

from collections.abc import Iterator
from pathlib import Path

from outrider.profiles import store

from ..errors import UserError
from ..model import hub, target
from ..model.target import Model
from ..settings import checkpoints, drafter_search, memory, model_kinds, profile_lookup
from ..settings.activations import with_activations
from ..settings.declared import CHECKPOINT_DRAFTERS, TRAINED_DRAFTERS
from ..settings.settings import Settings
from .finding import Finding, ok, problem, warning
from .machine import gib

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Any one of these files is enough for a tokenizer."""


REMEDIES = {
    "keys": "`outrider key NAME --api-keys FILE` makes keys and the file (docs/secure.md)",
    "certificate": "docs/secure.md has commands that make a pair, to try",
    "address": "`ss -ltnp` shows who listens where, `ip address` which addresses this machine has",
    "model": "name a model's folder, GGUF file or hub name with --model, or leave it out",
    "drafter": "see `outrider serve --help`; --drafter ngram needs no checkpoint",
    "model memory": "serve a smaller model or one in 4 bits (GGUF), or free memory",
    "profile": "leave --profile out, or measure one: `outrider tune`",
}


def examine(settings: Settings) -> Iterator[Finding]:
    """Check in order; stop at a problem if the later checks depend on the failed part."""
    yield from access(settings)
    subject = "model"
    try:
        model = target.find(settings.model)
        model_kinds.check_quantized(settings, model)
        settings = with_activations(settings, model)
        weights = target.weight_bytes(model, None)
        if lacking := _lacks(model):
            yield problem("model", f"{model.path}: {lacking}", "fetch it again, or name another with --model")
            return
        size = f"{gib(weights)} of weights, " if weights else ""
        yield ok("model", f"{model.name}, {size}context {model.context_length}")
        subject = "drafter"
        settings = checkpoints.with_drafter_path(drafter_search.with_found_drafter(settings, model), model)
        drafter = _drafter(settings, model)
        yield drafter
        subject = "model memory"
        tokens = memory.plan(settings, model).max_total_tokens
        yield ok(subject, f"fits, with a KV cache of {tokens} tokens" if tokens else "fits; SGLang sizes the cache")
        subject = "profile"
        if not drafter.remedy:
            yield _profile(settings, model)
    except UserError as error:
        yield problem(subject, str(error), REMEDIES[subject])


def _lacks(model: Model) -> str:
    """Say which files of a model this machine lacks, '' if it has all; the hub may have them."""
    folder = model.folder or hub.cached(model.path)
    if folder is None:
        return "its weights are not in the local cache of the hub, so that it needs the network to start"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return f"it has no tokenizer ({', '.join(TOKENIZER_FILES)})"
    return ""


def _drafter(settings: Settings, model: Model) -> Finding:
    if settings.drafter not in CHECKPOINT_DRAFTERS:
        return ok("drafter", "none" if settings.drafter == "off" else f"{settings.drafter}, which needs no weights")
    folder = Path(str(settings.drafter_path))
    if damage := drafter_search.damage(folder, model):
        makes = f" (`outrider train {settings.drafter} --target {model.path}` makes one)"
        trained = makes if settings.drafter in TRAINED_DRAFTERS else ""
        return problem("drafter", f"{folder}: {damage}", f"another --drafter-path{trained}, or --drafter ngram")
    return ok("drafter", f"{settings.drafter}, {folder}")


def _profile(settings: Settings, model: Model) -> Finding:
    found, unmeasured = profile_lookup.with_profile(settings, model)
    if found.profile is None:
        return ok("profile", "none is needed")
    if unmeasured:
        otherwise = "the next start measures a quick one" if settings.tune else "every draft is verified"
        return warning("profile", _why_none_fits(settings, model), f"`outrider tune` (else {otherwise})")
    profile = store.read(Path(found.profile))
    kind = "thorough" if profile.thorough else "a quick one"
    return ok("profile", f"{profile.name}, {kind}, of {profile.measured_at}")


def _why_none_fits(settings: Settings, model: Model) -> str:
    """Name the closest profile and its differences."""
    here = profile_lookup.fingerprint(settings, model)
    known = [profile for root in profile_lookup.roots() for profile in store.readable(root)]
    if not known:
        return "none is there"
    nearest = min(known, key=lambda profile: len(profile.fingerprint.differences(here)))
    return f"none fits; the nearest, {nearest.name}, has {'; '.join(nearest.fingerprint.differences(here))}"


def access(settings: Settings) -> Iterator[Finding]:
    """Keys, certificate and address, if set, and who could reach the server."""
    from ..http import listen
    from ..http.connections.tls import Tls
    from ..http.keys import key_file

    subject = "keys"
    try:
        if settings.api_keys is not None:
            yield ok("keys", f"{len(key_file.read(settings.api_keys))} in {settings.api_keys}")
        subject = "certificate"
        tls = Tls.of(settings)
        subject = "address"
        opened = listen.Listeners.open(settings)
    except UserError as error:
        yield problem(subject, str(error), REMEDIES[subject])
        return
    opened.requests.close()
    if opened.metrics is not None:
        opened.metrics.close()
    if tls is not None:
        refusal = tls.refusal()
        yield warning("certificate", refusal, "renew it") if refusal else ok("certificate", tls.certificate)
    where = f"{settings.host}:{settings.port}"
    if not (settings.api_key or settings.api_keys) and settings.host not in ("127.0.0.1", "::1", "localhost"):
        remedy = "ask for a key: OUTRIDER_API_KEY, or --api-keys (docs/secure.md)"
        yield warning("address", f"{where} is free; whoever reaches it may use it", remedy)
    else:
        yield ok("address", f"{where} is free")
