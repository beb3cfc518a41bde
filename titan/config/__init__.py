"""Typed settings, their checks, and what a command line consists of; it knows no axis by name."""
