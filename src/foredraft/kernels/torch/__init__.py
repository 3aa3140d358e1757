"""The kernels in plain torch: the reference, and what runs on a CPU."""
