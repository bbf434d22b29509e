"""Block-diffusion models in SGLang's dllm mode: which models, how they run, which tokens a denoising step reveals."""
