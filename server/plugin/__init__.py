"""The SGLang plugin: CPU platform, attention backend and speculative worker, found through entry points."""


def activate() -> str | None:
    """Return our platform's name where there is no GPU; None: SGLang's own.

    SGLang calls this in every process before it imports the rest of itself, so the torchvision stub is installed here.
    torch is imported only here: command lines import this package, and must answer at once.
    """
    import torch

    from .hooks import torchvision_stub

    torchvision_stub.install()
    if torch.cuda.is_available():
        return None
    return "outrider.server.plugin.hooks.platform:OutriderCpuPlatform"
