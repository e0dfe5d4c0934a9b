"""State of a training run outside of its variables: snapshots, restore and checkpoint files.

A snapshot holds what one worker needs to go on; a restore gives snapshots of one run to any number
of workers. The modules `checkpoint_*` write and read files, in plain Python and numpy. Nothing here
runs within a step.
"""
