"""The sweep axis, and the ledger of a sweep."""
