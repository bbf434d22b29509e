"""Names of the loggers that do not follow the log level."""

REQUESTS = "outrider.requests"
"""A line per request, with --log-requests."""
SERVER = "outrider.server"
"""State of the server: start, readiness, warnings."""
