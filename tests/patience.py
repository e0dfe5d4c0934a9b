"""Time limits of tests end what hangs, and slow machines are no hang."""

# The limits beside the tests are for two cores of some 3 GHz that nothing else uses. All are
# multiplied by this.
PATIENCE = 2
