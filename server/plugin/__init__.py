"""The SGLang plugin: CPU platform, attention backend and speculative worker, found through entry points."""


def activate() -> str | None:
    """Name our platform to SGLang where there is no GPU; on a GPU, SGLang's own platform is right.

    SGLang calls this in every process before anything else of it is imported, so the torchvision stand-in
    is put in place here. torch is imported here too: command lines import this package, and want to answer at once.
    """
    import torch

    from .hooks import torchvision_stub

    torchvision_stub.install()
    if torch.cuda.is_available():
        return None
    return "outrider.server.plugin.hooks.platform:OutriderCpuPlatform"
