"""Slurm: jobs, their batch script, and how they stand."""
