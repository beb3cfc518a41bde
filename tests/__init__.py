"""A package with a file of its own: else another package `tests`, which some libraries install, would be imported."""
