"""Reference implementations in plain numpy, one file per family, to test the library against.

Nothing here imports TensorFlow or `tf_redsync`. Each oracle is written from the paper alone, so it
does not share the library's errors.
"""
