"""What this machine is: processors, topology, threads, names it answers to."""
