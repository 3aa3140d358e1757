"""The scheduler: which rows of which requests make up the next step."""
