"""The ops in pure TensorFlow: the reference of the native ones, which give equal bits."""
