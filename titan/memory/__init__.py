"""The memory axis: activation checkpointing and offloading."""
