"""What a drafter's confidence is worth: records, fits, the fitted calibration, reliability diagrams."""
