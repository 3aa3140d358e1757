"""Benchmarks: speed against plain decoding and against transformers, and how many drafts are accepted."""
