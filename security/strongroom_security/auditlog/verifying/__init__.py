"""Whether the log is as it was written: what is held against what, and what is found."""
