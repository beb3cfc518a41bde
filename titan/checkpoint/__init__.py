"""The checkpoint axis: what makes one complete, and how it is saved and loaded."""
