"""What replays and evaluations of a run share: its command line composed again, and ranks in a temporary directory."""
