"""Reference implementations in plain numpy, one file a family, to test the library against.

Nothing here imports TensorFlow or `tf_redsync`: an oracle is written from the paper alone, so that
an error in the library cannot hide in it.
"""
