"""EAGLE-3 heads: drafters that predict token by token from the target's hidden states and their own."""
