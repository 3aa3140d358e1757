"""Kernels: what a model's layers compute, over paged rows; in Triton for a GPU, and in plain torch for any device."""
