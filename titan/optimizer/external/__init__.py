"""Optimizers of any package: which shards of a parameter each may update, measured, and how it runs on them."""
