"""Drafters: models that propose blocks of tokens, and their training."""
