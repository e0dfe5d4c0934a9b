"""The command line: `tf-redsync`, also `python -m tf_redsync`."""
