"""How a network is called with drawn weights: once, at S of them, in half precision."""
