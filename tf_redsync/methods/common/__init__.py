"""What methods share. Nothing here is public but `SyncSchedule`.

* `sparsifier`: base class and delivery of methods that send selected elements;
  `momentum_correction`: those of them with momentum before the selection;
* `quantizer`: base class and delivery of methods that send a few bits of every element;
  `quantized_blocks`: quantised sums in two phases, one block for each worker;
  `integer_sums`: small integers added up without rounding;
* `recursive_doubling`: rounds between pairs of workers; `balanced_regions`: regions of a vector
  that hold equal shares of a selection; `broadcast`: a leader's words to all workers;
  `rounded_all_reduce`: sums in 16 bits;
* `matrix_factors`: tensors as products of two factors;
* `random_numbers`: equal on all workers, or of a worker's own;
* `sync_schedule`: when a method exchanges what;
* `wrapper`: a method around another one.
"""
