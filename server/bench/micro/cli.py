"""Time of a part: the kernels, a planner's step, an engine's step. Each has flags of its own.

examples:
  outrider bench micro kernels --only attention
  outrider bench micro steps --shapes 1x1,8x8
"""

# name: (module, one line of help)
COMMANDS = {
    "blocks": ("outrider.server.bench.micro.blocks", "products with weights in blocks, by rows"),
    "kernels": ("outrider.server.bench.micro.kernels", "compiled kernels beside plain torch"),
    "plan": ("outrider.server.bench.micro.plan", "time that each planner takes per step"),
    "steps": ("outrider.server.bench.micro.steps", "time of one engine step by shape"),
}
