"""Metrics of a training: measured while it runs, recorded in files, shown in an HTML report.

`sampling.py` reads the exchange and `profiler.py` profiles a few steps. `records.py` writes and
reads the files of a run directory, without TensorFlow, and `page.py` makes a report of them. The
callback is `tf_redsync.callbacks.CompressionMetrics`.
"""
