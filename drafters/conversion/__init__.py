"""Turning a target into a block-diffusion model: row layout, trained delta, its storage and its training."""
