#!/usr/bin/env bash
# Check deploy/ with linters and schemas: `make check-deploy`. Names checks that cannot run here; fails if any objects.
#   deploy/check.sh FOLDER_OF_THE_CHECKERS
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$1:$PATH"

say() { printf '%-14s %s\n' "$1" "$2"; }

hadolint --config deploy/docker/hadolint.yaml deploy/docker/*.Dockerfile
say images "hadolint has no objection"

checkov --directory deploy/docker --framework dockerfile --compact --quiet --skip-download
say images "checkov has no objection"

git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck
say scripts "shellcheck has no objection"

check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
say compose "fits the schema of the Compose specification"
if docker compose version >/dev/null 2>&1; then
    OUTRIDER_API_KEY=key GRAFANA_PASSWORD=word docker compose --file deploy/compose/compose.yaml config --quiet
    say compose "Docker reads it"
else
    say compose "not read by Docker: its Compose plugin is not here"
fi

if command -v kubectl >/dev/null; then
    rendered=$(mktemp --suffix .yaml)
    all=$(mktemp --suffix .yaml)
    trap 'rm -f "$rendered" "$all"' EXIT
    for overlay in deploy/kubernetes/overlays/*/; do
        kubectl kustomize "$overlay" >"$rendered"
        cat "$rendered" >>"$all"
        echo --- >>"$all"
        for version in 1.29 1.33 1.37; do
            kubernetes-validate --strict --quiet --kubernetes-version "$version" "$rendered"
        done
    done
    say kubernetes "overlays fit the schemas of Kubernetes 1.29, 1.33 and 1.37"
    # The user chooses the image, and so its pull policy (15) and digest (43).
    checkov --file "$all" --framework kubernetes --skip-check CKV_K8S_15,CKV_K8S_43 --compact --quiet --skip-download
    say kubernetes "checkov has no objection"
else
    say kubernetes "not checked: kubectl is not here"
fi

if command -v systemd-analyze >/dev/null; then
    folder=$(mktemp --directory)
    sed 's#^ExecStart=/opt/outrider/bin/outrider#ExecStart=/bin/true#' deploy/systemd/outrider.service >"$folder/outrider.service"
    systemd-analyze verify "$folder/outrider.service"
    systemd-analyze security --offline=true --threshold=15 "$folder/outrider.service" >/dev/null
    rm -r "$folder"
    say systemd "the unit is sound, its exposure below 1.5 of 10"
else
    say systemd "not checked: systemd-analyze is not here"
fi

if command -v haproxy >/dev/null; then
    LISTEN=127.0.0.1:8000 SERVER_1=127.0.0.1:8001 SERVER_2=127.0.0.1:8002 haproxy -c -q -f deploy/replicas/haproxy.cfg
    say haproxy "the configuration is valid"
else
    say haproxy "not checked: haproxy is not here"
fi
