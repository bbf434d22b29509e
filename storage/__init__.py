"""Files that are written whole, and stay whole where the power fails."""
