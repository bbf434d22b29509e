"""Draft graphs: which coming states of a diffusion model's block are worth a look in the same forward.

Structuring the Future: Diffusion LLM speculative decoding via calibrated draft graphs (Spiffy, arXiv 2509.18085).
Arrays in, arrays out, without a model or an engine.
"""
