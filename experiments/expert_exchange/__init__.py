"""Other exchanges of tokens between ranks that share experts, and computation beside titan's."""
