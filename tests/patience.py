"""A factor for the time limits of tests on slow machines."""

# Limits in tests assume two idle cores at about 3 GHz. All are multiplied by this factor.
PATIENCE = 2
