"""Measured step-cost profiles and calibrations."""
