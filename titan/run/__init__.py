"""A run: its recipe, its checks, its ids and its directory."""
