"""`posterior.fit`: a posterior fitted to data in minibatches."""
