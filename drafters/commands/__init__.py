"""`outrider train` and `outrider export`: their flags and stages."""
