"""One optimizer's exchange: gradients in, totals out, and when workers exchange what.

Here live the builder, the exchange of a whole model, the sync schedules (every step, local steps,
streaming, delayed, a trial), the state variables and the handling of non-finite steps. Nothing here
knows Keras, files, or a method's algorithm.
"""
