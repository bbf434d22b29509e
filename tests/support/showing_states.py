"""Prints, as a JSON list, the architectures whose class in SGLang shows hidden states of its layers; a program of its
own, since it registers our models."""

import json


def main() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from outrider.server.plugin.loading import drafter, more_models

    more_models.register()
    print(json.dumps([name for name, model in ModelRegistry.models.items() if hasattr(model, drafter.CAPTURE)]))


if __name__ == "__main__":
    main()
