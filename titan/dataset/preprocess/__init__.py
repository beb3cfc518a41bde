"""From documents to prepared shards of tokens."""
