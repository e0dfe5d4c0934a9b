"""Laws of all methods: a table of descriptors and the tests that check them."""
