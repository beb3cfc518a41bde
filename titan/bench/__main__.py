"""`python -m titan.bench`."""

from titan.bench.command import main
from titan.console import output

if __name__ == "__main__":
    output.run(main)
