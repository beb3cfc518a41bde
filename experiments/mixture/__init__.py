"""Which mixture of data sources is best: small runs on random mixtures, a regression, and two larger runs."""
