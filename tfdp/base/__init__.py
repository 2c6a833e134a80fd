"""What every room uses: checks of arguments, random numbers, TensorFlow's and Keras's versions."""
