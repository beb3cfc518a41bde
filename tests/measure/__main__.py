"""`python -m tests.measure`: see `tests.measure.command`."""

from tests.measure.command import main
from titan.console import output

if __name__ == "__main__":
    output.run(main)
