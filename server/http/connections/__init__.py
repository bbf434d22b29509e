"""Connections: accepted up to a limit, with TLS, time limits, and checks of the host that they ask for."""
