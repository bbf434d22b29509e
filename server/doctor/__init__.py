"""What is wrong with an installation, and what to do: the checks behind `outrider doctor`."""
