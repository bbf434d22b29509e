"""Only where Triton interprets: `TRITON_INTERPRET=1 pytest tests/server/plugin/interpreted`, as test_interpreted.py."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
