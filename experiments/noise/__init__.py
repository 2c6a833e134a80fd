"""The distribution of the noise, and attacks on its bits."""
