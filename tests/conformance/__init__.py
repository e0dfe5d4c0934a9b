"""Laws that every method obeys or declares to break: one table of descriptors, one file of laws."""
