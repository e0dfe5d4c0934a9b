"""The ops in pure TensorFlow, with the same bits as the native ops."""
