"""Costs of decode steps: measured times and the model made of them."""
