"""Checks of an installation, each with a remedy: `outrider doctor`."""
