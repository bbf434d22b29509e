"""Hooks that tie our code into SGLang."""
