"""Evaluation on any layout: validation sets, tasks, averaged weights; during training and of checkpoints."""
