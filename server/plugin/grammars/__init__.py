"""Grammars: compiled in a process of their own within limits, carried to the scheduler, watched while followed."""
