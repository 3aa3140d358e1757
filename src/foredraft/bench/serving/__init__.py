"""A benchmark of any OpenAI-compatible server over HTTP: requests, their load, and what came of them."""
