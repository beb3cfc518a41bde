"""The profile axis: where the time and memory of a step go; `python -m titan.profile RUN` shows it again."""
