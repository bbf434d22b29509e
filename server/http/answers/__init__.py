"""Answers: SGLang's OpenAI handlers, and our additions to their output."""
