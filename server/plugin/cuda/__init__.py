"""Adapts SGLang's attention on NVIDIA GPUs, so that it verifies requests of different lengths."""
