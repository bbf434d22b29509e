"""User errors: reported in one line, without a traceback."""


class UserError(Exception):
    """A mistake that the user can correct. The message names it and the remedy."""
