"""Fingerprints of SGLang's code that Outrider replaces, overrides or relies on: `sglang_contracts.json`.

A name there has a fingerprint, and our file if we replace or override it. To rely on more code, add its name with "".
`python tests/support/sglang_contracts.py` prints the differences to the installed SGLang, with the places of our code,
and the architectures that the family table lacks. `--write` writes fingerprints and files anew. Do so after reading
every change and adapting our code.
"""

import ast
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from outrider.server.model import families

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).resolve().parents[2]

TOUCHED = """
import importlib, itertools, json, os, pkgutil, sys
os.environ["OUTRIDER_PROMPT_LOGITS"] = "/dev/null"
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from outrider.server.plugin import must_take
places = {}
def noting(change):
    def noted(target, *others, **named):
        caller, before = sys._getframe(1), len(must_take.replaced)
        change(target, *others, **named)
        for name in [target] if isinstance(target, str) else must_take.replaced[before:]:
            places.setdefault(name, f"{caller.f_code.co_filename}:{caller.f_lineno}")
    return noted
HookRegistry.register, must_take.replace = noting(HookRegistry.register), noting(must_take.replace)
load_plugins()
from outrider.server import http, plugin, processes
from outrider.server.plugin.diffusion import models
from outrider.server.plugin.diffusion.target import DiffusionTarget
from outrider.server.plugin.cuda import prefill_graphs, tuning
from outrider.server.plugin.hooks import disaggregation, draft_memory, register
from outrider.server.plugin.loading import more_models
disaggregation.register_hooks()
draft_memory.register()
prefill_graphs.register()
tuning.register()
more_models.register()
register._capture_verification()
models.register(DiffusionTarget(block_size=4, mask_token_id=0))
walks = [pkgutil.walk_packages(folder.__path__, folder.__name__ + ".") for folder in (plugin, http, processes)]
for found in itertools.chain(*walks):
    module = importlib.import_module(found.name)
    for cls in [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]:
        for name in vars(cls):
            base = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
            raw, full = vars(base).get(name), f"{base.__qualname__}.{name}"
            code = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            if base.__module__.startswith("sglang.") and getattr(code, "__qualname__", "") == full:
                places.setdefault(f"{base.__module__}.{full}", f"{module.__file__}:{cls.__qualname__}")
print("\\n" + json.dumps(places))
"""
"""Prints the names that we hook, replace or override, on CPUs and GPUs, and where."""


@cache
def touched() -> dict[str, str]:
    """Names that we change, each with our file and line or class. Raises RuntimeError if the installed SGLang does not
    fit."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", TOUCHED], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip())
    places = {name: place.rsplit(":", 1) for name, place in json.loads(ran.stdout.splitlines()[-1]).items()}
    return {name: f"{os.path.relpath(Path(path).resolve(), ROOT)}:{part}" for name, (path, part) in places.items()}


@cache
def fingerprint(name: str) -> str:
    """16 hex digits of the code without comments and docstrings. Raises LookupError for a missing name."""
    code = ast.dump(_without_docstrings(_definition(name)), include_attributes=False)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _definition(name: str) -> ast.AST:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (path := _path(".".join(parts[:end]))) is not None:
            return _within(path, parts[:end], parts[end:], name)
    raise LookupError(name)


def _path(module: str) -> Path | None:
    base = Path(str(distribution("sglang").locate_file("/".join(module.split(".")))))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _within(path: Path, module: list[str], parts: list[str], name: str) -> ast.AST:
    first, *inner = parts
    node = next((child for child in ast.walk(_tree(path)) if _defines(child, first)), None)
    if node is None:
        return _imported(path, module, parts, name)
    for part in inner:
        node = next((child for child in node.body if _defines(child, part)), None)  # type: ignore[attr-defined]
        if node is None:
            raise LookupError(name)
    return node


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _imported(path: Path, module: list[str], parts: list[str], name: str) -> ast.AST:
    package = module if path.name == "__init__.py" else module[:-1]
    for child in ast.walk(_tree(path)):
        if not isinstance(child, ast.ImportFrom):
            continue
        above = package[: len(package) - child.level + 1] if child.level else []
        for alias in child.names:
            if alias.name == "*" or (alias.asname or alias.name) == parts[0]:
                original = parts[0] if alias.name == "*" else alias.name
                try:
                    return _definition(".".join([*above, *filter(None, [child.module]), original, *parts[1:]]))
                except LookupError:
                    continue
    raise LookupError(name)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _without_docstrings(node: ast.AST) -> ast.AST:
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            inner.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return node


def read() -> dict[str, Any]:
    """SGLang's version, and each name with fingerprint and file, as of the last review."""
    return dict(json.loads(FILE.read_text()))


def known() -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprint, and our file if there is one, by name."""
    code = read()["code"]
    files = {name: each.partition(" ")[2] for name, each in code.items() if " " in each}
    return {name: each.partition(" ")[0] for name, each in code.items()}, files


def contract() -> dict[str, Any]:
    """Return the content that `read` should have for the installed SGLang and our code."""
    (prints, files), places = known(), touched()
    code = {}
    for name in sorted({*prints} - {*files} | {*places}):
        code[name] = f"{fingerprint(name)} {places.get(name, '').rpartition(':')[0]}".strip()
    return {"sglang": version("sglang"), "code": code}


def differences(places: dict[str, str]) -> list[str]:
    """A line for each fingerprint that has changed, is missing, or is of code that we no longer touch.

    places: our code for each name.
    """
    prints, files = known()
    lines = [f"{name} is no longer touched" for name in files if name not in places]
    for name in sorted({*prints} - {*files} | {*places}):
        place = places.get(name, "relied on")
        try:
            found = fingerprint(name)
        except LookupError:
            lines.append(f"{name} is not there ({place})")
            continue
        if not prints.get(name):
            lines.append(f"{name} has not been read ({place})")
        elif found != prints[name]:
            lines.append(f"{name} has changed ({place})")
    return lines


def architectures() -> set[str]:
    """Names in SGLang's registry of models, including modules that import only on a GPU."""
    names = set()
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    for path in (Path(spec.origin).parent / "srt" / "models").glob("*.py"):
        _, name, rest = path.read_text().partition("\nEntryClass")
        for statement in ast.parse(name.strip() + rest).body if name else []:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EntryClass":
                value = statement.value
                names |= {ast.unparse(each) for each in (value.elts if isinstance(value, ast.List) else [value])}
    return names


def report() -> list[str]:
    """A line for each change to read before Outrider moves to the installed SGLang."""
    lines = []
    try:
        places = touched()
    except RuntimeError as error:
        lines.append(f"Outrider does not fit it: {str(error).splitlines()[-1]}")
        places = known()[1]
    listed = families.SERVED.union(*(each.names.split() for each in families.REFUSED))
    new = [f"{name} is not in server/model/families.toml" for name in sorted(architectures() - listed)]
    return [*lines, *differences(places), *new]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps(contract(), indent=1) + "\n")
    else:
        lines = report()
        print(f"SGLang {version('sglang')}, read was {read()['sglang']}:", *lines or ["nothing to read"], sep="\n")
        sys.exit(bool(lines))
