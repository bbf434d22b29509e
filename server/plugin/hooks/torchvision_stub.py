"""Replaces torchvision where it is not installed. SGLang imports two of its names at module level although text models
never use them, and not every torch version that we run on has a CPU build of torchvision."""

import enum
import importlib.util
import sys
import types


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def install() -> None:
    """Make `import torchvision` succeed, unless the real one is there."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    import transformers
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    # transformers hides this class when torchvision is absent; it must be resolved before the stub appears.
    sys.modules["transformers"].__dict__["AutoImageProcessor"] = AutoImageProcessor
    del transformers
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
        module.__dict__["InterpolationMode"] = InterpolationMode
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
