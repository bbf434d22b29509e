"""Measure on this machine: from the whole server down to single kernels.

Arms that are compared run in one session and take turns, round by round, so that what else the machine does meets all
of them. Their ratio and its spread over the rounds are the result; the times hold for this machine at this moment.

examples:
  outrider bench speed --prompts humaneval.jsonl
  outrider bench load --prompts code.jsonl chat.jsonl --concurrency 1,8,32 --json load.json --plot load.png
  outrider bench accept --prompts humaneval.jsonl --json accept.json
"""

from __future__ import annotations

# name: (module, one line of help)
COMMANDS = {
    "speed": ("outrider.server.bench.speed", "tokens per second with speculation over without"),
    "load": ("outrider.server.bench.load.cli", "throughput and latency under load, of any server or arm by arm"),
    "soak": ("outrider.server.bench.soak.cli", "mixed load for long: changed answers, failures, memory"),
    "diffusion": ("outrider.server.bench.diffusion", "forwards and tokens per second of a block-diffusion model"),
    "peers": ("outrider.server.bench.peers", "tokens per second beside other engines"),
    "accept": ("outrider.server.bench.accept", "accepted length and acceptance by position, on the engine"),
    "drafters": ("outrider.server.bench.drafters", "the same of drafter folders, without a server"),
    "drafts": ("outrider.server.bench.micro.drafts", "time of a draft beside its verification"),
    "steps": ("outrider.server.bench.micro.steps", "time of one engine step by shape"),
    "plan": ("outrider.server.bench.micro.plan", "time that each planner takes per step"),
    "kernels": ("outrider.server.bench.micro.kernels", "compiled kernels beside plain torch"),
}
