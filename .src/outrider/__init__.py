"""Lossless speculative serving for large language models, inside SGLang."""
