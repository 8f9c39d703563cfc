"""What is approximated: a network with likelihood and prior, or any log density."""
