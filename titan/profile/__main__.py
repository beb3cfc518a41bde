"""`python -m titan.profile`."""

from titan.console import output
from titan.profile.command import main

if __name__ == "__main__":
    output.run(main, keep_going=False)
