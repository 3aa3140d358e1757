"""The runner: one step on tensors: target forward, verification, drafting."""
