"""`python -m tests.measure`: see `tests.measure.command`."""

from tests.measure.command import cli

if __name__ == "__main__":
    cli()
