"""Write a drafter folder in another storage: int8, as Outrider ships drafters, or bfloat16, for stock SGLang.

With --target, merge the delta that `outrider train dllm` made into that model's weights: a folder to serve; or write an
EAGLE-3 head for vLLM. It prints the folder and its size in MB.

examples:
  outrider export runs/dspark/drafter --storage int8 --out dspark-int8
  outrider export runs/dllm/delta --target ./model --out dllm
  outrider export runs/eagle3/drafter --storage speculators --target ./model --out eagle3-vllm
"""

import argparse

from outrider.drafters.commands import arguments
from outrider.drafters.commands.export import export

from ..errors import UserError

add_arguments = arguments.add_export_arguments


def run(args: argparse.Namespace) -> int:
    try:
        return int(export(args) or 0)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
