"""A target made into a block-diffusion model: which rows see what, the trained delta, its storage, its training."""
