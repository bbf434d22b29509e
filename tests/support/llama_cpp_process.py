"""The process of `llama_cpp.py`: serves a GGUF file until its standard input ends. It imports little, to start fast."""

import sys

import xllamacpp


def serve(file: str, context: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = file, 0, ["127.0.0.1"]
    params.n_parallel, params.n_ctx, params.warmup = 1, context, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # the default rounds
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # rounds too
    server = xllamacpp.Server(params)
    print("listens", server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
