"""Whether two computations agree: fingerprints, differences, bounds; for replays, proofs, audits and parity."""
