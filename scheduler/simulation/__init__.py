"""Planners under load, without the hardware."""
