"""Hooks: a user's own code at named moments of a run."""
