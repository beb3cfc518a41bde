"""Text from a trained model: a key-value cache, sampling, and incremental detokenization."""
