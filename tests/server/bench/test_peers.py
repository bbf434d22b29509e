"""Scripts of tests/measure/peers start other engines as OpenAI servers."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import wait_until

from outrider.server.bench import remote

PEERS = Path(__file__).parents[3] / "tests" / "measure" / "peers"
PIPELINE = '''
class SchedulerConfig: pass
class GenerationConfig: pass

class Status:
    name = "RUNNING"

class Handle:
    def __init__(self, prompt, config):
        self.left, self.status, self.new = config.max_new_tokens, Status(), []
    def can_read(self): return bool(self.new)
    def get_status(self): return self.status
    def read(self):
        output, self.new = type("Output", (), {"generated_ids": self.new}), []
        return {0: output}

class Tokenizer:
    def apply_chat_template(self, messages, add_generation_prompt): return messages[-1]["content"] + " :"
    def decode(self, ids): return "".join(f"<{i}>" for i in ids)
    def encode(self, text):
        ids = type("Tensor", (), {"shape": (1, len(text.split()))})
        return type("Encoded", (), {"input_ids": ids})

class ContinuousBatchingPipeline:
    """Makes a token a step for each request, once two are running: alone it would never end."""
    def __init__(self, file, scheduler, device, options):
        assert not scheduler.enable_prefix_caching
        self.running, self.begun = [], 0
    def get_tokenizer(self): return Tokenizer()
    def add_request(self, number, prompt, config):
        self.running.append(Handle(prompt, config))
        self.begun += 1
        return self.running[-1]
    def step(self):
        for handle in self.running if self.begun > 1 else []:
            handle.new.append(handle.left)
            handle.left -= 1
            if not handle.left:
                handle.status.name = "FINISHED"
        self.running = [handle for handle in self.running if handle.left]
'''


def test_openvino_answers_over_http(tmp_path: Path) -> None:
    """Two requests share the steps of its pipeline."""
    (tmp_path / "openvino_genai.py").write_text(PIPELINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(PEERS / "openvino_server.py"), "small.gguf", str(port), "1"]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)})

    async def ask() -> list[remote.Reply]:
        async with remote.connect(f"http://127.0.0.1:{port}") as connected:
            body = {"messages": [{"role": "user", "content": "one two"}], "stream": True}
            asking = [connected.ask(remote.CHAT, body | {"max_tokens": n}, timeout=20) for n in (2, 3)]
            return list(await asyncio.gather(*asking))

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, seconds=20)
        two, three = asyncio.run(ask())
    finally:
        server.kill()
        server.wait()
    assert (two.failure, two.text, two.prompt_tokens, two.completion_tokens) == ("", "<2><1>", 3, 2)
    assert (three.failure, three.text, three.completion_tokens) == ("", "<3><2><1>", 3)


@pytest.mark.parametrize("lock", sorted(PEERS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_package_of_a_peer_is_pinned(lock: Path) -> None:
    packages = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in packages)


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["mlx", __file__, "1"], 2, "serve.sh llama.cpp|openvino FILE.gguf PORT"),
        (["vllm"], 2, "serve.sh sglang|vllm FOLDER PORT"),
        (["vllm", "/nowhere", "1"], 1, "/nowhere does not exist"),
    ],
)
def test_unsupported_options_are_refused(words: list[str], code: int, reason: str) -> None:
    done = subprocess.run([PEERS / "serve.sh", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert reason in done.stderr
