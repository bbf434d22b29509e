"""Models with parts for images of which the text is served: their architectures, and those of their text alone."""

TEXT = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
