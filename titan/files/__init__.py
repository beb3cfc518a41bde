"""Files that several processes or an attacker may change: locks, leases, checked reading; and the platform."""
