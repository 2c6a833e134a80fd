"""TensorFlow variables, functions and workers, as several parts of tfdp need them."""
