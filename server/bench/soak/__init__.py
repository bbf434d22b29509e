"""`outrider bench soak`: a server under mixed load for long, watched for what must not happen."""
