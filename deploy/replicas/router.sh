#!/usr/bin/env bash
# SGLang's router for several servers: it sends a request to the server that has cached its prompt's prefix.
#   pip install sglang-router==0.3.2
#   HOST=0.0.0.0 PORT=8000 deploy/replicas/router.sh http://10.0.0.1:30000 http://10.0.0.2:30000
# Chats lose fields unknown to the router, see docs/scale.md; haproxy.cfg in this folder keeps them.
set -euo pipefail
if [ $# = 0 ]; then
    echo "usage: router.sh URL_OF_SERVER..." >&2
    exit 2
fi
# A draining server (/ready) gets no more requests; with --lame-duck-seconds 3 it still answers requests sent before the
# router sees this. No retries: the router cannot tell a refused request from one that ended its server. No circuit
# breaker: sglang-router 0.3.2 also counts clients' mistakes (400) and excludes healthy servers.
# Small balance thresholds: our servers run few requests at a time.
exec "${PYTHON:-python3}" -m sglang_router.launch_router --worker-urls "$@" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
    --policy cache_aware --cache-threshold 0.3 --balance-abs-threshold 8 --balance-rel-threshold 1.5 \
    --health-check-endpoint /ready --health-check-interval-secs 1 \
    --health-failure-threshold 1 --health-success-threshold 1 \
    --disable-circuit-breaker --disable-retries \
    --worker-startup-check-interval 1 --shutdown-grace-period-secs 45 \
    --prometheus-host "${HOST:-127.0.0.1}" --prometheus-port "${METRICS_PORT:-29000}" --log-level warn
