"""Files: posteriors, checkpoints of fits, and the one format of both."""
