"""The programs behind `python -m tf_redsync.launch`, `doctor` and `plan`."""
