"""Train a drafter for a target.

The target answers the prompts, its features are stored, the drafter is trained on them, and its accepted length (tau,
tokens per step) is measured. Without prompts of your own the target writes some itself. The same command resumes an
interrupted run.

With --from-log training uses earlier answers from a log. Answers that the model would not give are left out, and the
answers to one prompt in eight are held out.

`outrider serve --drafter dspark --drafter-path` takes OUT/drafter. `eagle3` trains an EAGLE-3 head by
training-time test, each step over the states of the one before: SGLang's EAGLE3 takes its OUT/drafter too. `dllm`
makes the target itself a block-diffusion model: `outrider export` makes of OUT/delta the folder that
`outrider serve --model` takes.

examples:
  outrider train dspark --target ./model --prompts prompts.jsonl --out runs/dspark
  outrider train dspark --target ./model --from-log requests.jsonl --start runs/dspark/drafter --out runs/learned
  outrider train dflash --target ./model --self-prompts 2000 --out runs/dflash
  outrider train both --target ./model --prompts prompts.jsonl --out runs --loss authors --minutes 9
  outrider train eagle3 --target ./model --prompts prompts.jsonl --out runs/eagle3 --draft-vocab 8192
  outrider train deer --target ./model --prompts prompts.jsonl --out runs/deer
  outrider train dllm --target ./model --prompts prompts.jsonl --out runs/dllm
"""

import argparse
from pathlib import Path

from outrider.drafters.block.config import BLOCK_KINDS
from outrider.drafters.commands import arguments, train
from outrider.drafters.training.loop import plot_losses

from .. import pictures
from ..errors import UserError
from ..machine import hardware
from ..model import target

add_arguments = arguments.add_arguments


def run(args: argparse.Namespace) -> int:
    if Path(args.target).is_file():  # a GGUF file
        args.target = target.plain_folder(args.target)
    if args.dtype == "auto":
        args.dtype = hardware.faster_dtype(args.device)
    try:
        train.run(args)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    parts = BLOCK_KINDS if args.kind == "both" else arguments.DIFFUSION_STAGES.get(args.kind, ("",))
    folders = [args.out / part for part in parts]
    for losses in [folder / "losses.csv" for folder in folders]:  # a run of very few steps writes none
        if losses.exists() and not pictures.available():
            print("matplotlib is not installed: no losses.png, the numbers are in losses.csv")
        elif losses.exists():
            with pictures.figure(losses.with_name("losses.png")) as figure:
                plot_losses(losses, figure)
    return 0
