"""Evaluation: named validation sets and tasks from local files, and what is computed from their log-likelihoods."""
