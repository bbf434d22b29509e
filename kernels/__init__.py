"""Flattened variable-length compute kernels, each beside a plain torch reference. See `docs/kernels.md`."""
