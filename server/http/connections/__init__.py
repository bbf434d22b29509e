"""Connections: accepted up to a limit, with TLS, time limits, and checks of the requested host."""
