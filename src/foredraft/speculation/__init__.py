"""Speculative decoding: what is drafted, and what of it is kept."""
