"""What a method and the network share: requests, layout, messages, the driver and the loopback.

`Method` is the base class of all methods; `Context` is what an exchange knows of its step. Nothing
here touches `tf.distribute` or makes variables.
"""
