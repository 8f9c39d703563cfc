"""From a posterior to predictions, and how good they are."""
