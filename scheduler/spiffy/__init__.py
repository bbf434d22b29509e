"""Draft graphs of block-diffusion models (Spiffy, arXiv 2509.18085): arrays in, arrays out, without an engine."""
