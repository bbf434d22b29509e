"""TokenBuckets: the numbers of tokens that a decode step may have on a GPU, where a graph is captured for each.

A step of R requests that admits K draft tokens runs in the smallest bucket T that holds R + K. Padding takes as long as
verifying tokens, so K is raised to T - R if enough are drafted. The size is known before drafting, so no step waits
for the device.
"""

from bisect import bisect_left

import numpy as np


class TokenBuckets:
    """The buckets of at most `requests` requests of `width` tokens each (gamma + 1).

    sizes: ascending, the largest is requests * width.
    captured: most requests for which graphs are captured; None: all. Larger steps have buckets, and no graph.
    """

    def __init__(self, requests: int, width: int, captured: int | None = None):
        if min(requests, width) < 1:
            raise ValueError(f"buckets are for at least one request of one token, not {requests} of {width}")
        self.requests, self.width = requests, width
        self.captured = requests if captured is None else min(captured, requests)
        most = requests * width
        sizes, size = [], 1  # eight from one power of two to the next: padding is less than an eighth of a step
        while size < most:
            sizes.append(size)
            size += max(1, 2 ** (size.bit_length() - 1) // 8)
        self.sizes = (*sizes, most)
        self._sizes = np.array(self.sizes)

    def round_up(self, tokens: int) -> int:
        """The smallest bucket of at least `tokens`. Raises ValueError where there is none."""
        if not 0 < tokens <= self.sizes[-1]:
            raise ValueError(f"a step has 1 to {self.sizes[-1]} tokens, not {tokens}")
        return self.sizes[bisect_left(self.sizes, tokens)]

    def round_up_each(self, tokens: np.ndarray) -> np.ndarray:
        """`round_up` of every number of `tokens`."""
        return self._sizes[np.searchsorted(self._sizes, tokens)]

    @property
    def graphs(self) -> tuple[int, ...]:
        """The sizes for which a graph is captured."""
        return tuple(size for size in self.sizes if size <= self.captured * self.width)

    def slots(self, tokens: int) -> int:
        """Requests that a graph of `tokens` has room for. The padding takes the place of one, except where each token
        is of another request."""
        return min(tokens, self.captured + 1)

    def has_graph(self, requests: int, tokens: int) -> bool:
        """True if a step of `requests` in a bucket of `tokens` runs as a graph."""
        slots = self.slots(tokens)
        return tokens <= self.captured * self.width and (requests < slots or requests == slots == tokens)

    def fill_bucket(self, requests: int, wanted: int, room: int) -> int:
        """Draft tokens that fill the bucket of `wanted` draft tokens, at most `room`."""
        return min(self.round_up(requests + min(wanted, room)) - requests, room)
