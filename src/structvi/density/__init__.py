"""`vi.fit_density`: a family fitted to a log density on fixed draws."""
