"""Grammars: compiled in their own process within limits, passed to the scheduler, and timed while they are followed."""
