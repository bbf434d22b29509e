"""Requests: from the bytes of a body to a checked request."""
