"""The parallelism axis: degrees, the device mesh, and data, tensor, context and pipeline parallelism on it."""
