"""Prints, as JSON, the architectures with a class in SGLang that returns hidden states; a separate program since it
registers our models."""

import json


def main() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from outrider.server.plugin.loading import drafter, more_models

    more_models.register()
    print(json.dumps([name for name, model in ModelRegistry.models.items() if hasattr(model, drafter.CAPTURE)]))


if __name__ == "__main__":
    main()
