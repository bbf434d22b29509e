#!/usr/bin/env bash
# Builds the CPU image from its Dockerfile and lets it serve, in about ten minutes. Needs root, buildah (no daemon) and
# debootstrap, to replace the base image by a clean Debian. Arguments go to `buildah build`.
#   make check-image ARGS="--volume /etc/pip.conf:/etc/pip.conf:ro"
set -euo pipefail
cd "$(dirname "$0")/../.."
base=localhost/outrider-base:bookworm
image=localhost/outrider:check
for program in buildah debootstrap unshare; do
    command -v "$program" >/dev/null || { echo "check-image needs $program: apt-get install buildah debootstrap" >&2; exit 1; }
done
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT

if ! buildah images "$base" >/dev/null 2>&1; then
    debootstrap --variant=minbase bookworm "$work/root" >"$work/log" || { cat "$work/log"; exit 1; }
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/root" / >/dev/null
    buildah commit --quiet "$container" "$base"
    buildah rm "$container" >/dev/null
fi
sed "s#^FROM debian:[^ ]*#FROM $base#" deploy/docker/cpu.Dockerfile >"$work/Dockerfile"
buildah build --format docker --isolation chroot --pull-never --layers "$@" --file "$work/Dockerfile" --tag "$image" .

# A separate network, since the image's port may be in use here.
container=$(buildah from --pull-never "$image")
trap 'rm -rf "$work"; buildah rm "$container" >/dev/null' EXIT
export container
unshare --net bash -euo pipefail <<'INSIDE'
ip link set lo up
inside() { buildah run --isolation chroot "$container" -- "$@" </dev/null; } # stdin holds this script
python3 - <<'PYTHON' >"/tmp/$container.commands"
import json, re, shlex
text = open("deploy/docker/cpu.Dockerfile").read().replace("\\\n", " ")
for name, pattern in (("serve", r"^CMD (.*)$"), ("healthy", r"^HEALTHCHECK .*CMD (.*)$"), ("enter", r"^ENTRYPOINT (.*)$")):
    words = json.loads(re.findall(pattern, text, re.MULTILINE)[-1])
    print(f"{name}=({shlex.join(words)})")
PYTHON
source "/tmp/$container.commands"
rm "/tmp/$container.commands"
inside "${enter[@]}" doctor
inside sh -c '! command -v g++ && test "$(id -u)" != 0' || { echo "it has a compiler, or runs as root" >&2; exit 1; }
setsid buildah run --isolation chroot "$container" -- "${enter[@]}" "${serve[@]}" </dev/null &
server=$!
trap 'kill -KILL -- "-$server" 2>/dev/null || true' EXIT
for _ in $(seq 150); do
    inside "${healthy[@]}" 2>/dev/null && break
    kill -0 "$server"
    sleep 2
done
inside "${healthy[@]}"
inside python -c '
import json, urllib.request
body = {"model": "SmolLM2-135M-Instruct", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
request = urllib.request.Request("http://127.0.0.1:30000/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"]
print("It answers:", answer)
assert "Paris" in answer
'
# Signal the program itself; buildah's parent processes would end it at once.
kill -TERM "$(pgrep --pgroup "$server" --full '^/opt/outrider/bin/python3 /opt/outrider/bin/outrider serve' | head -n 1)"
wait "$server" || { echo "it did not end with 0" >&2; exit 1; }
echo "The image is built, sound, serves, and drains"
INSIDE
