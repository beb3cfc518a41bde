"""Scaling laws of tables of runs: read a table, fit a law, predict with intervals, and compare variants by compute."""
