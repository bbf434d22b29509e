"""Time one part of the engine, such as a step. Each part has its own flags.

examples:
  outrider bench micro steps --shapes 1x1,8x8
"""

# name: (module, one line of help)
COMMANDS = {"steps": ("outrider.server.bench.micro.steps", "time of one engine step by shape")}
# former name: the command that replaces it
MOVED = {
    "blocks": "`python tests/measure/block_times.py` in a checkout",
    "plan": "`python tests/measure/plan_times.py` in a checkout",
}
