"""What several methods of `contrib` share. Nothing here is public.

* `recursive_doubling`: rounds between pairs of workers; `balanced_regions`: regions of a vector
  that hold equal shares of a selection; `broadcast`: a leader's words to all workers;
* `quantized_blocks`: quantised sums in two phases, one block for each worker; `decoded_sums`: sums
  of messages, decoded in groups of workers.
"""
