"""`outrider bench` and `outrider simulate`: measurements, each a module with `add_arguments` and `run`."""
