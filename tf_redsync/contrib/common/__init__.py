"""Building blocks that several methods of `contrib` use. Nothing here is public.

* `recursive_doubling`: reduction in log2(K) rounds between pairs of workers;
* `quantized_blocks`: messages of two-phase quantized reductions, one block for each worker.
"""
