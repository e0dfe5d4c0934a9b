"""State of a training run outside of its variables: snapshots, restore and checkpoint files.

A snapshot holds the state that one worker needs to resume; a restore gives the snapshots of a run
to any number of workers. The modules `checkpoint_*` write and read files in plain Python and numpy.
Nothing here runs within a step.
"""
