"""Secret random numbers: keys, a cryptographic stream, and Gaussians of exact distribution."""
