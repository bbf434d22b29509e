"""Triton kernels for CUDA.

No kernel waits for the device. Shapes of results depend on shapes of arguments and on numbers that the host knows
(requests R, gamma, graph bucket T), never on lengths. The functions of `outrider.kernels` choose them by device and
hold a torch reference of each. `native.py` imports the modules that need Triton.
"""
