"""Upper bounds of the histograms of times, in seconds: from a GPU's milliseconds to a CPU's minutes. Each is at most
about twice the one before, so an estimated quantile is within a factor of two of the true one."""

from __future__ import annotations

TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
    *(5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0),
    *(20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 480.0, 960.0, 1920.0, 3600.0),
)
