"""Benchmarks, one module per suite or part of one.

command (the command line), suites (the cases), speed (training speed against bare_loop), activation_modes,
checkpoint (saving), preparing and loading (data), generation, features and experts (ratios of two sides in turn).
"""
