"""SGLang's operators on a machine without a GPU, by our kernels."""
