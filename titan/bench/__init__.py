"""Benchmarks: speed (titan against bare_loop), separate_runs (activation checkpointing, saving), acceptance of a device
(lab, device_checks), and the measurements of titan.calibrate (calibration, trials)."""
