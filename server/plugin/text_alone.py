"""Models with image or sound parts that are served for their text: their architectures, and their texts'."""

TEXT = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}

IMAGES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""The ones that also read images, on a CPU."""
PREPROCESSOR = "preprocessor_config.json"
"""File of a model's folder that says how images are prepared; without it only the model's text is served."""

AXES = "position_axes"
"""Field of the configuration of a text that is served with images: `image_models.axes`."""


def text_of(architecture: str, model_type: str) -> str:
    """Return the architecture of a whole model's text, by the text's `model_type`; any other unchanged."""
    name = TEXT.get(architecture, architecture)
    return "Ministral3ForCausalLM" if name == "MistralForCausalLM" and model_type == "ministral3" else name
