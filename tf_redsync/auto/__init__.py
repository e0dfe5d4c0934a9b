"""The choice of an exchange by measurement.

* `auto`: `Auto`, what users write;
* `probe`: measures the network and what a method computes;
* `cost`: predicts what an exchange takes;
* `decision`: compares the predictions, and the table of them.
"""

from tf_redsync.auto.auto import CLEARLY, WORTHWHILE_SECONDS, Auto, wins

__all__ = ["CLEARLY", "WORTHWHILE_SECONDS", "Auto", "wins"]
