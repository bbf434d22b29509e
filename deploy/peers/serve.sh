#!/usr/bin/env bash
# Serve a model with another engine on 127.0.0.1, to be measured beside ours:
#
#   deploy/peers/serve.sh llama.cpp|openvino FILE.gguf PORT
#   deploy/peers/serve.sh sglang|vllm FOLDER PORT
#   outrider bench load --url ours=http://127.0.0.1:30000 other=http://127.0.0.1:PORT --concurrency 1,8,32
#
# OUTRIDER_THREADS: processors to use (default: all). OUTRIDER_REQUESTS: how many share llama.cpp's context of 32,768
# tokens (default: 32). Prompts share no cache; start ours with `--disable-radix-cache --no-lookup-across`.
# Engines whose packages cannot stand beside ours get an environment in the user's cache: a minute, 2 GB for vLLM, which
# also compiles the model at each start. `outrider prepare --unpack` makes a folder of a GGUF file.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
usage() { sed -n '2,6p' "$0" >&2; exit 2; }
[ $# = 3 ] || usage
engine=$1 model=$2 port=$3
threads=${OUTRIDER_THREADS:-$(nproc)}
[ -e "$model" ] || { echo "$model does not exist: give a GGUF file or a model's folder" >&2; exit 1; }

# environment NAME PIP_ARGUMENTS…: made once for each of its arguments and lock
environment() {
  local name=$1; shift
  local key; key=$({ echo "$*"; cat "$here/$name.txt" 2>/dev/null || true; python3 -V; } | sha256sum | cut -c1-16)
  venv=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/peers/$name-$key
  [ -e "$venv/.ready" ] && return
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" --disable-pip-version-check install --quiet --no-deps "$@" && touch "$venv/.ready"
}

unset PYTHONPATH
case $engine in
  llama.cpp)
    environment llama.cpp -r "$here/llama.cpp.txt"
    exec "$venv/bin/python" "$here/llama_cpp_server.py" "$model" "$port" "$threads" "${OUTRIDER_REQUESTS:-32}" ;;
  openvino)
    environment openvino -r "$here/openvino.txt"
    exec "$venv/bin/python" "$here/openvino_server.py" "$model" "$port" "$threads" ;;
  vllm)
    environment vllm -r "$here/vllm.txt"
    export VLLM_CPU_OMP_THREADS_BIND=0-$((threads - 1)) VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-2}
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    exec "$venv/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --no-enable-prefix-caching ;;
  sglang) # plain torch, in our environment: on a CPU SGLang does not start without our platform
    export OUTRIDER_PLATFORM_ONLY=1 SGLANG_PLUGINS=outrider OMP_NUM_THREADS=$threads
    exec "$here/../../.venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
      --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-radix-cache \
      --disable-overlap-schedule --max-total-tokens "${MAX_TOTAL_TOKENS:-16384}" ;;
  *) usage ;;
esac
