"""The paged cache: blocks and their owners, and the tensors behind them."""
