"""titan: pre-train large language models on PyTorch and compare the recipes for doing it."""

__version__ = "0.1.0"
