"""Install the pieces of `pack.py` on a machine without a network, as far as they have arrived.

Pieces are kept in STORE from call to call, so that each call may bring one; a damaged one is asked for again. When all
are there, the wheels are installed into STORE/site: put that on PYTHONPATH. Exit code 2: some are missing.

  python unpack.py FOLDER --store /tmp/gpu-pack
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with MANIFEST.json and some of the pieces")
    parser.add_argument("--store", type=Path, default=Path("/tmp/gpu-pack"), help="(default: %(default)s)")
    args = parser.parse_args()
    try:
        manifest = json.loads((args.folder / "MANIFEST.json").read_text())
    except OSError:
        print(f"unpack: {args.folder} has no MANIFEST.json", file=sys.stderr)
        return 1
    args.store.mkdir(parents=True, exist_ok=True)
    missing = [piece["name"] for piece in manifest["pieces"] if not arrived(piece, args.folder, args.store)]
    if missing:
        print(f"unpack: {len(missing)} of {len(manifest['pieces'])} pieces are missing: {' '.join(missing)}")
        return 2
    site, done = args.store / "site", args.store / "installed.json"
    if not (done.exists() and json.loads(done.read_text()) == manifest["wheels"]):
        wheels = joined(manifest, args.store)
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        if subprocess.run([*command, "--target", site, *wheels], check=False).returncode:
            return 1
        done.write_text(json.dumps(manifest["wheels"]))
    print(f"unpack: {len(manifest['wheels'])} wheels are installed: export PYTHONPATH={site.absolute()}")
    return 0


def arrived(piece: dict, folder: Path, store: Path) -> bool:
    """Whether the piece is in the store and whole, if need be from the folder."""
    kept = store / piece["name"]
    for path in (kept, folder / piece["name"]):
        if path.exists() and digest(path) == piece["sha256"]:
            if path != kept:
                shutil.copy(path, kept)
            return True
    kept.unlink(missing_ok=True)
    return False


def joined(manifest: dict, store: Path) -> list[Path]:
    """The wheels, cut out of the pieces one after the other. Raises SystemExit where one is not what was packed."""
    folder, found = store / "wheels", []
    folder.mkdir(exist_ok=True)
    pieces = [store / piece["name"] for piece in manifest["pieces"]]
    content = b""
    for wheel in manifest["wheels"]:
        while len(content) < wheel["size"]:
            content += pieces.pop(0).read_bytes()
        path = folder / wheel["name"]
        path.write_bytes(content[: wheel["size"]])
        content = content[wheel["size"] :]
        if digest(path) != wheel["sha256"]:
            sys.exit(f"unpack: {wheel['name']} is not what was packed; pack again")
        found.append(path)
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
