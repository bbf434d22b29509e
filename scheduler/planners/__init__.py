"""Planners: who drafts, and how many draft tokens of each request are verified. See `docs/planner.md`."""
