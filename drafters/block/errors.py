"""The error of a drafter checkpoint."""


class CheckpointError(ValueError):
    """A drafter checkpoint that cannot be used; the message says what differs."""
