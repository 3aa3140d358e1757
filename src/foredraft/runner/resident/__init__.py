"""Decoding with state that stays on the device: the host sends which requests run, and reads what came of them."""
