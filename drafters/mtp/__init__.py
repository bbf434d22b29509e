"""MTP layers: drafters that come with a target, in its own checkpoint."""
