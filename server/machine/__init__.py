"""The machine: processors, topology, threads, host names."""
