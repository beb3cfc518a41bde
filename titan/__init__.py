"""titan: pre-train large language models on PyTorch and compare the recipes for doing it."""

import sys

from titan.console.requirements import check_requirements

__version__ = "0.1.0"

check_requirements(sys.argv[:1])
