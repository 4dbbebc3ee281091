"""What a run is, what its probes say about it, and what follows from them."""
