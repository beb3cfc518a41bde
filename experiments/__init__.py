"""New techniques, each on titan's public names only."""
