"""Tokenizers: their formats, and how one is trained."""
