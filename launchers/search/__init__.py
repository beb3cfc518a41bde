"""Sweeps whose trials are chosen by the results of earlier ones, with Optuna."""
