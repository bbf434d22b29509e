"""The running engine: its processes, their start and end, and requests to them."""
