"""`outrider bench load`: throughput and latency under load."""
