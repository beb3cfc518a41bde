"""`python -m tests.measure`."""

from tests.measure.command import main
from titan.console import output

if __name__ == "__main__":
    output.run(main)
