"""Evidence about many small changes: e-values of paired differences, an error budget, and the book of both."""
