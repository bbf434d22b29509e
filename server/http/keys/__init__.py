"""API keys: their file, their rights, and their limits on requests and tokens."""
