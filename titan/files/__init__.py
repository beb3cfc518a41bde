"""Files that several processes or an attacker may change: locks, leases and checked reading."""
