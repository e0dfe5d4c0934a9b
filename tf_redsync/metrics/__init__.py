"""What is measured of a training while it runs, kept in files, and shown as a page.

`sampling.py` reads the exchange, `time_split.py` a profile of some steps; `records.py` writes and
reads the files of a run directory, without TensorFlow; `history.py` makes one history of them, and
`page.py` a page of HTML. The callback is `tf_redsync.callbacks.CompressionMetrics`.
"""
