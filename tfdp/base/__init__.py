"""Parts that every room uses: checks of arguments, random numbers, versions of Keras."""
