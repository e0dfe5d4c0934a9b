"""Checkpoints on disk, written by several workers: plain Python and numpy, without TensorFlow."""
