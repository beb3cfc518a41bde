"""titan: pre-train large language models on PyTorch and compare the recipes for doing it."""

import sys

from titan.console import output
from titan.console.requirements import check_requirements

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # a command: Ctrl-C may come while it imports
    sys.excepthook = output.print_exception
check_requirements(sys.argv[:1])
