"""The parallelism axis: degrees, the mesh, and what is cut or copied over it."""
