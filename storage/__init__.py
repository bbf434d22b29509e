"""Atomic, durable files."""
