"""Weights in and out: Hugging Face, Meta and titan formats."""
