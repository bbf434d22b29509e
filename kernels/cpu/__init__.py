"""The C++ kernels: their sources, how they are compiled and loaded."""
