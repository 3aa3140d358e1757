"""Calls of tools in a model's text: read as they stream, and asked for by grammars."""
