"""Private building blocks that several methods share.

* `sparsifier`: base class of methods that send selected elements, and their all-gather;
  `momentum_correction`: sparsifiers with momentum before the selection;
  `coded_selection`: sparsifiers with Golomb-coded positions and values of a few bits;
* `quantizer`: base class of methods that send a few bits of every element, and their all-gather;
  `threshold_codes`: quantizers to a threshold, its negative and zero;
  `ternary_all_reduce`: sums of ternary codes by an all-reduce;
* `rounded_all_reduce`: all-reduces in 16 bits or in blocks of integers, with error feedback;
  `small_floats`: all-reduces in floats of 4 or 8 bits, without error feedback;
* `chunking`: tensors cut into chunks; `chunk_messages`: messages of k elements of each chunk;
  `two_bit_values`: their values in two bits;
* `random_numbers`: random streams, equal on all workers or one for each worker;
* `wrapper`: base class of methods that wrap another one.
"""
