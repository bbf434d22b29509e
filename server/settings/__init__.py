"""Settings of a server, checked against the machine and the model."""
