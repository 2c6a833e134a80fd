"""The traced graph of a loss: reading it, copying it, and making it safe to differentiate."""
