"""Calibration of drafters' confidences: records, fits, the fitted calibration, reliability diagrams."""
