"""titan: pre-train large language models on PyTorch and compare the recipes for doing it."""

import sys

from titan.console import output, requirements

__version__ = requirements.VERSION

if sys.argv[:1] == ["-m"]:  # a command: Ctrl-C may come while it imports
    sys.excepthook = output.print_exception
requirements.check_requirements(sys.argv[:1])
