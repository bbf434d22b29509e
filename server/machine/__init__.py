"""This machine: processors, topology, threads, host names."""
