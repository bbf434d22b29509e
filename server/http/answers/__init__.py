"""Answers: SGLang's OpenAI handlers, and what is added to what they write."""
