"""The exchange of one optimizer: it takes gradients and returns their totals over the workers.

This folder holds the builder, the exchange of a whole model, the sync schedules (every step, local
steps, streaming, delayed, a trial), the state variables and the handling of non-finite steps. Code
here does not depend on Keras, on files, or on the algorithm of a method.
"""
