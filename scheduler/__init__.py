"""Decides how many draft tokens of each request to verify."""
