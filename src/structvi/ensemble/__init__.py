"""Several networks: ensembles of posteriors, and many fits at once."""
