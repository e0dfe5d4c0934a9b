"""Helpers for processes that tests start."""

# Code before the first import of tf_redsync in a process that needs no TensorFlow, whose import
# takes seconds: the process looks like the command `tf-redsync`.
AS_COMMAND = "import sys; sys.orig_argv = ['python', '-m', 'tf_redsync']\n"


def alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process ended before or during the read
        return False
