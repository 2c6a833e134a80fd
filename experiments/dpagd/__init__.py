"""DPAGD: gradient descent that chooses its step sizes and its privacy budget as it goes."""
