"""Answers of SGLang's own dllm mode, LowConfidence, on a CPU: stock_dllm.py FOLDER THRESHOLD TOKENS < prompts.json

Prints a list of token ids for each prompt of token ids.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

REGISTER = """
from outrider.server.plugin.diffusion import models
models.register_configs()  # in the place of the model's own code
"""


def main(folder: str, threshold: float, count: int) -> None:
    import sglang

    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "low.yaml").write_text(f"threshold: {threshold}\n")
        engine = sglang.Engine(
            model_path=folder, device="cpu", dtype="float32", attention_backend="torch_native",
            sampling_backend="pytorch", disable_overlap_schedule=True, disable_radix_cache=True, max_total_tokens=2048,
            max_running_requests=4, dllm_algorithm="LowConfidence", dllm_algorithm_config=str(Path(made) / "low.yaml"),
            log_level="error",
        )  # fmt: skip
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answers = engine.generate(input_ids=json.load(sys.stdin), sampling_params=sampling)
        print(json.dumps([answer["output_ids"] for answer in answers]))
        engine.shutdown()


if __name__ == "__main__":
    if "OUTRIDER_PLATFORM_ONLY" not in os.environ:
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "sitecustomize.py").write_text(REGISTER)
            paths = os.pathsep.join([made, *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {"OUTRIDER_PLATFORM_ONLY": "1", "SGLANG_PLUGINS": "outrider", "PYTHONPATH": paths}
            sys.exit(os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], os.environ | environment))
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
