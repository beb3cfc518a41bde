"""`python -m titan.profile`."""

from titan.profile.command import cli

if __name__ == "__main__":
    cli()
