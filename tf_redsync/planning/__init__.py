"""The dry run behind `python -m tf_redsync.plan`: model, prediction, report, picture."""
