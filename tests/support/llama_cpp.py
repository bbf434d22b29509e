"""llama.cpp (package xllamacpp) reads GGUF files independently, in a separate process since it aborts on errors.

with llama_cpp.opened(FILE) as reader: reader.logprobs(ids)
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from running import HTTP

PROGRAM = Path(__file__).with_name("llama_cpp_process.py")


@dataclass(frozen=True, slots=True)
class Reader:
    url: str

    def logprobs(self, ids: Sequence[int], vocabulary: int) -> torch.Tensor:
        """[vocabulary] log-probabilities of the next token after `ids`."""
        body = {"prompt": list(ids), "n_predict": 1, "n_probs": vocabulary, "cache_prompt": False}
        body |= {"logit_bias": [["a", 1000.0]]}  # it returns unbiased ones, but none for half a character
        (first,) = self._ask("/completion", body)["completion_probabilities"]
        result = torch.full((vocabulary,), -torch.inf)
        for token in first["top_logprobs"]:
            result[token["id"]] = token["logprob"]
        return result

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. special: names of special tokens become these tokens."""
        return self._ask("/tokenize", {"content": text, "parse_special": special, "add_special": False})["tokens"]

    def _ask(self, route: str, body: dict) -> dict:
        answer = HTTP.post(self.url + route, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextlib.contextmanager
def opened(file: Path, log: Path, context: int = 512) -> Iterator[Reader]:
    """log: for llama.cpp's messages. context: the most tokens of a text. Fails with llama.cpp's last words."""
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(file), str(context)],
            stdin=subprocess.PIPE,  # its end ends the child if this process is killed
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # a backtrace takes a debugger half a minute
        )
    try:
        assert child.stdout is not None
        url = next((line.split()[1] for line in child.stdout if line.startswith("listens ")), "")
        assert url, f"llama.cpp cannot read {file}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        yield Reader(url)
    finally:
        child.kill()
        child.wait()
