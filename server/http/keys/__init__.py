"""API keys: the file of them, who may do what, and the limits on requests and tokens."""
