"""Triton kernels for CUDA, as operators `torch.ops.outrider_cuda` with fake implementations.

None waits for the device, and the shape of every result depends on the shapes of the arguments and on numbers that the
host knows: on the requests R, on gamma and on the graph bucket T, never on a length. The functions of
`outrider.kernels` choose them by device; each stands beside a torch reference there. `native.py` imports the modules
that need Triton.
"""
