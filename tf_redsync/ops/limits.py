"""Limits of the native ops and of messages."""

MAX_WORD = 2**32 - 1  # positions are unsigned 32-bit integers
MAX_COUNT = 2**31 - 1  # counts in messages and in tf.math.top_k are int32
