"""Flattened variable-length compute kernels, each with a plain torch reference. See `docs/kernels.md`."""
