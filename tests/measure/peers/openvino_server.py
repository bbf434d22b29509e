"""OpenVINO GenAI's continuous batching of a GGUF file as an OpenAI server: its package has none.

    python openvino_server.py FILE.gguf PORT THREADS

Chat completions of one choice, greedy, streamed with usage; prompts share no cache.
"""

import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

FILE, PORT, THREADS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
scheduler = SchedulerConfig()
scheduler.enable_prefix_caching = False
scheduler.max_num_batched_tokens = 2**31 - 1  # a prompt in one piece, as in its LLMPipeline
pipeline = ContinuousBatchingPipeline(FILE, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS})
tokenizer = pipeline.get_tokenizer()
arrived: queue.Queue = queue.Queue()


def work() -> None:
    """The only thread that touches the pipeline: accept arrived requests, then make a step."""
    numbers, running = count(), []
    while True:
        while not running or not arrived.empty():
            prompt, config, tokens = arrived.get()
            running.append((pipeline.add_request(next(numbers), prompt, config), tokens))
        pipeline.step()
        for handle, tokens in list(running):
            if handle.can_read():
                tokens.put(next(iter(handle.read().values())).generated_ids)
            if handle.get_status().name != "RUNNING" and not handle.can_read():
                running.remove((handle, tokens))
                tokens.put(None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = json.dumps({"data": [{"id": FILE}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos = body["max_tokens"], body.get("ignore_eos", False)
        config.do_sample = False
        tokens: queue.Queue = queue.Queue()
        arrived.put((prompt, config, tokens))
        made: list[int] = []
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        while (ids := tokens.get()) is not None:
            made += ids
            self.event({"choices": [{"delta": {"content": tokenizer.decode(ids)}}]})
        usage = {"prompt_tokens": tokenizer.encode(prompt).input_ids.shape[1], "completion_tokens": len(made)}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, value: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        """Write no log."""


if __name__ == "__main__":
    threading.Thread(target=work, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
