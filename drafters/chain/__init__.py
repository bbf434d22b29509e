"""Drafters of one layer that chains over its own output: EAGLE-3 heads, MTP layers."""
