"""`vi.fit`: a family fitted to a log density on fixed draws."""
