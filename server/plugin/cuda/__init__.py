"""SGLang's attention on NVIDIA GPUs, where it needs ours to verify requests of different lengths."""
