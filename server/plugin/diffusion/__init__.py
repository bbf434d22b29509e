"""Block-diffusion models in SGLang's dllm mode: which they are, what a denoising step reveals, how they run."""
