"""Sources of documents: files, the hub, chats, the standard library, and a generator of tokens."""
