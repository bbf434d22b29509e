"""Parts that a decode step can do without: `part.py` is their interface."""
