"""Measure on this machine: from the whole server down to single kernels.

Arms take turns, round by round, so that other load on the machine affects all of them. The result is their ratio and
its spread over the rounds; times hold only for this machine at this moment.

examples:
  outrider bench load --prompts code.jsonl chat.jsonl --concurrency 1,8,32 --json load.json --plot load.png
  outrider bench load --url ours=http://127.0.0.1:30000 vllm=http://127.0.0.1:8000 --concurrency 1,8
  outrider bench micro steps --shapes 1x1,8x8
"""

# name: (module, one line of help)
COMMANDS = {
    "load": ("outrider.server.bench.load.cli", "throughput and latency under load, of servers or arm by arm"),
    "drafters": ("outrider.server.bench.drafters", "accepted length of drafter folders, without a server"),
    "micro": ("outrider.server.bench.micro.cli", "time of a part: steps"),
}
# former name: the command that replaces it
MOVED = {
    "speed": "outrider bench load --prompts FILE… --arms off planned --concurrency 1",
    "accept": 'outrider bench load --prompts FILE… --arms "verify all"',
    "diffusion": "outrider bench load --model FOLDER --prompts FILE…",
    "peers": "outrider bench load --url NAME=URL NAME=URL…, of servers that tests/measure/peers starts",
    "drafts": "outrider tune --drafter-path FOLDER, then outrider drafters MODEL",
    "steps": "outrider bench micro steps",
    "plan": "`python tests/measure/plan_times.py` in a checkout",
    "soak": "`python tests/measure/soak.py` in a checkout",
    "learn": "`python tests/measure/learning.py` in a checkout",
    "quality": "`python tests/measure/rounding.py` in a checkout",
    "scores": "`python tests/measure/scores.py` in a checkout",
    "report": "`python tests/measure/performance.py` in a checkout",
}
