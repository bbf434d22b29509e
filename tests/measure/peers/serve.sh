#!/usr/bin/env bash
# Serve a model with another engine on 127.0.0.1, for comparison with ours:
#
#   tests/measure/peers/serve.sh llama.cpp|openvino FILE.gguf PORT
#   tests/measure/peers/serve.sh sglang|vllm FOLDER PORT
#   outrider bench load --url ours=http://127.0.0.1:30000 other=http://127.0.0.1:PORT --concurrency 1,8,32
#
# OUTRIDER_THREADS: processors to use (default: all). OUTRIDER_REQUESTS: requests sharing llama.cpp's context of 32,768
# tokens (default: 32). Prompts share no cache; start ours with `--disable-radix-cache --no-lookup-across`.
# Each engine gets an environment in the user's cache: a minute, 2 GB for vLLM, which also compiles the model at each
# start. llama.cpp is compiled once for this processor from llama-cpp-python's sources: ten minutes on two cores, with a
# C++ compiler. `outrider prepare --unpack` makes a folder from a GGUF file.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
usage() { sed -n '2,6p' "$0" >&2; exit 2; }
[ $# = 3 ] || usage
engine=$1 model=$2 port=$3
threads=${OUTRIDER_THREADS:-$(nproc)}
[ -e "$model" ] || { echo "$model does not exist: give a GGUF file or a model's folder" >&2; exit 1; }

# environment NAME PIP_ARGUMENTS…: made once per arguments and lock
environment() {
  local name=$1; shift
  local key; key=$({ echo "$*"; cat "$here/$name.txt" 2>/dev/null || true; python3 -V; } | sha256sum | cut -c1-16)
  venv=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/peers/$name-$key
  [ -e "$venv/.ready" ] && return
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" --disable-pip-version-check install --quiet --no-deps "$@" && touch "$venv/.ready"
}

# The folder of llama.cpp's programs, compiled once for this processor's instructions
compiled_llama_cpp() {
  local key; key=$({ echo "$LLAMA_CPP_PYTHON"; grep -m1 '^flags' /proc/cpuinfo; c++ --version; } | sha256sum | cut -c1-16)
  built=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/peers/llama.cpp-built-$key
  [ -e "$built/llama-server" ] && return
  local work; work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  echo "Compiling llama.cpp for this processor (once)" >&2
  "$venv/bin/pip" --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" \
    "llama-cpp-python==$LLAMA_CPP_PYTHON"
  tar -xzf "$work"/*.tar.gz -C "$work"
  # GCC 12 removes most stores of a tile's configuration as dead; AMX then crashes.
  PATH=$venv/bin:$PATH CXXFLAGS="-w -fno-dse -fno-tree-dse" cmake -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -G Ninja --log-level=WARNING \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_SUBPROCESS=OFF >&2
  "$venv/bin/ninja" -C "$work/build" llama-server >&2
  mkdir -p "$built"
  mv "$work/build/bin/llama-server" "$built/"
  rm -rf "$work"
  trap - EXIT
}
LLAMA_CPP_PYTHON=0.3.36

unset PYTHONPATH
case $engine in
  llama.cpp)
    environment llama.cpp -r "$here/llama.cpp.txt"
    compiled_llama_cpp
    exec "$built/llama-server" --model "$model" --host 127.0.0.1 --port "$port" --threads "$threads" \
      --parallel "${OUTRIDER_REQUESTS:-32}" --ctx-size 32768 --no-cache-prompt ;;
  openvino)
    environment openvino -r "$here/openvino.txt"
    exec "$venv/bin/python" "$here/openvino_server.py" "$model" "$port" "$threads" ;;
  vllm)
    environment vllm -r "$here/vllm.txt"
    export VLLM_CPU_OMP_THREADS_BIND=0-$((threads - 1)) VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    # not its command, which needs a package named vllm
    exec "$venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "$port" --no-enable-prefix-caching ;;
  sglang) # plain torch, in our environment: SGLang on a CPU needs our platform
    export OUTRIDER_PLATFORM_ONLY=1 SGLANG_PLUGINS=outrider OMP_NUM_THREADS=$threads
    exec "$here/../../.venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
      --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-radix-cache \
      --disable-overlap-schedule --max-total-tokens "${MAX_TOTAL_TOKENS:-16384}" ;;
  *) usage ;;
esac
