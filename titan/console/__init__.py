"""What a command prints: text without secrets, and output streams that may be closed."""
