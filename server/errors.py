"""Errors that are the user's: reported in one line, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that whoever started the command can put right; the message says what and how."""
