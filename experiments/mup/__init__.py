"""Transfer of hyperparameters over width and depth, for AdamW and Muon."""
