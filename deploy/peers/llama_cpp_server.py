"""llama.cpp's own server, of the package xllamacpp: python llama_cpp_server.py FILE.gguf PORT THREADS [REQUESTS].

REQUESTS in flight (32) share a context of 32,768 tokens evenly: fewer for long prompts.
"""

import signal
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.hostnames = ["127.0.0.1"]
params.n_parallel = int(sys.argv[4]) if len(sys.argv) > 4 else 32
params.n_ctx = 32 * 1024
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.cache_prompt = False
server = xllamacpp.Server(params)
print(f"ready at {server.listening_address}", file=sys.stderr)
signal.pause()
