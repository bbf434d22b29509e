"""Names of the loggers that do not follow the log level."""

REQUESTS = "outrider.requests"
"""A line per request, if one is wanted."""
SERVER = "outrider.server"
"""State of the server: start, readiness, warnings."""
