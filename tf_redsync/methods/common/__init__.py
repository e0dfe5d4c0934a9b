"""What methods share. Nothing here is public.

* `sparsifier`: base class and delivery of methods that send selected elements;
  `momentum_correction`: those of them with momentum before the selection;
* `quantizer`: base class and delivery of methods that send a few bits of every element;
  `threshold_codes`: the base class of those that send two bits; `integer_sums`: small integers
  added up without rounding;
* `rounded_all_reduce`: sums in 16 bits;
* `matrix_factors`: tensors as products of two factors;
* `random_numbers`: equal on all workers, or of a worker's own;
* `wrapper`: a method around another one.
"""
