"""The interface between methods and networks: requests, layouts, the driver and the loopback.

`Method` is the base class of all methods; `Context` describes an exchange's step. Nothing here uses
`tf.distribute` or creates variables.
"""
