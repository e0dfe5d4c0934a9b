"""The exchange of one optimizer, which maps gradients to their totals over the workers.

This folder contains the builder, the exchange of a whole model, the sync schedules, the state
variables and the handling of non-finite steps. Its code does not depend on Keras, on files, or on
the algorithm of a method.
"""
