"""Turning logits into tokens: filters, draws and the random numbers behind them."""
