"""Where our code is tied into SGLang."""
