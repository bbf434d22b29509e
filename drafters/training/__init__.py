"""Training of drafters: synthesise answers, store target features, train, validate, export.

Needs torch, transformers, safetensors, numpy and tqdm only; the serving engine is not imported.
"""
