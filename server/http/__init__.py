"""The HTTP surface: OpenAI's routes on SGLang's handlers, health, metrics, errors."""
