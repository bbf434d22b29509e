"""From settings to a running engine, and the way to talk to it."""
