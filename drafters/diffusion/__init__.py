"""DEER and SpecDiff: diffusion drafters, which need only the target's tokens."""
