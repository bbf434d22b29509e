"""`outrider tune`: measures step costs and calibrates the drafter."""
