"""How a run reaches machines: ranks on this one, ranks that torchrun or srun started, and the points of a sweep."""
