"""`outrider bench micro`: times of parts, without a server."""
