"""Choice of an exchange by measurement.

* `auto`: `Auto`, the users' interface;
* `bit_budget`: `BitBudget`, which chooses each variable's setting by its error;
* `candidates`: the methods that `Auto` may choose;
* `probe`: measures the network and the methods' computation;
* `cost`: predicts the time of an exchange;
* `decision`: the decision and its table.
"""

from tf_redsync.auto.auto import Auto, wins

__all__ = ["Auto", "wins"]
