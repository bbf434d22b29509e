"""GGUF files by their names on the hub: huggingface_hub with a local hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny_gguf
from refusals import refuses

from outrider.server.model import hub_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The hub's routes for a public repository, OWNER/tiny."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        resolve, listing = "/OWNER/tiny/resolve/main/", "/api/models/OWNER/tiny/tree/main"
        if path == listing:
            rows = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in self.files.items()]
            self.send(json.dumps(rows).encode(), "application/json", body)
        elif path.startswith(resolve) and (data := self.files.get(path.removeprefix(resolve))) is not None:
            self.send(data, "application/octet-stream", body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, data: bytes, kind: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A hub with a model of two types and a split one."""
    even = tiny_gguf.write(tmp_path / "a.gguf", kind="Q8_0").read_bytes()
    odd = tiny_gguf.write(tmp_path / "b.gguf", kind="Q4_1").read_bytes()
    Hub.files = {
        "README.md": b"text", "mmproj-tiny-Q4_K_M.gguf": b"no model", "tiny-Q4_1.gguf": odd, "tiny-Q8_0.gguf": even,
        "Q6_K/tiny-Q6_K-00001-of-00002.gguf": even, "Q6_K/tiny-Q6_K-00002-of-00002.gguf": odd,
    }  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def fetched(name: str, hub: str, cache: Path, offline: bool = False) -> str:
    """Path of the fetched file, or the error."""
    code = f"""
from outrider.server.errors import UserError
from outrider.server.model import hub_gguf
try:
    print(hub_gguf.fetch({name!r}))
except UserError as error:
    print(error)
"""
    names = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1" if offline else "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | names, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_file_is_fetched_by_its_type_and_found_again_offline(hub: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetched("hf.co/OWNER/tiny:q8_0", hub, cache)
    assert Path(path).name == "tiny-Q8_0.gguf"
    assert Path(path).read_bytes() == Hub.files["tiny-Q8_0.gguf"]
    for address in (hub, "http://127.0.0.1:9"):  # offline by setting, and no server there
        assert fetched("OWNER/tiny:Q8_0", address, cache, offline=address == hub) == path
    assert "not in the local cache" in fetched("OWNER/other:Q8_0", hub, cache, offline=True)


@pytest.mark.slow
def test_all_parts_of_a_split_file_are_fetched(hub: str, tmp_path: Path) -> None:
    path = Path(fetched("https://huggingface.co/OWNER/tiny:Q6_K", hub, tmp_path / "cache"))
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "tiny-Q6_K-00001-of-00002.gguf",
        "tiny-Q6_K-00002-of-00002.gguf",
    ]
    assert path.name == "tiny-Q6_K-00001-of-00002.gguf"


@pytest.mark.slow
def test_missing_files_are_named(hub: str, tmp_path: Path) -> None:
    assert fetched("OWNER/tiny:Q5_K_M", hub, tmp_path / "cache") == (
        "OWNER/tiny has no GGUF file of type Q5_K_M; it has Q6_K/tiny-Q6_K, tiny-Q4_1, tiny-Q8_0"
    )
    assert "not known" in fetched("OWNER/nothing:Q8_0", hub, tmp_path / "cache")


def test_the_file_of_no_type() -> None:
    files = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-IQ4_K_M.gguf"]
    assert hub_gguf._choose("a/b", files, None) == ["m-Q4_K_M.gguf"]
    assert hub_gguf._choose("a/b", files[:1], None) == ["m-Q2_K.gguf"]
    refuses("has 1 of the 3 parts", hub_gguf._choose, "a/b", ["m-00001-of-00003.gguf"], None)
    refuses("has no GGUF file", hub_gguf._choose, "a/b", [], None)


@pytest.mark.parametrize(
    ("name", "is_gguf"),
    [("a/b", False), ("b", False), ("a/b:Q8_0", True), ("hf.co/a/b", True), ("./a/b:Q8_0", False), ("a/b/c:Q8", False)],
)
def test_names(name: str, is_gguf: bool) -> None:
    assert hub_gguf.names_gguf(name) is is_gguf
