"""The measurements of titan.calibrate: figures of a machine, from kernels, collectives and steps of small models."""
