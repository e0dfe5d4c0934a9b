"""The programs behind the command `tf-redsync`, which is `python -m tf_redsync` too."""
