"""The bodies of requests, responses and errors, as clients of OpenAI's API know them."""
