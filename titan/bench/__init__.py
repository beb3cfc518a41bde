"""Benchmarks: titan beside the bare PyTorch loop."""
