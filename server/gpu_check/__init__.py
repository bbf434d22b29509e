"""`outrider gpu-check`: what tests without a GPU cannot show, in parts of at most seven minutes."""
