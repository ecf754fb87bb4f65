"""Questions to the log: an index that can be made anew at any time, and what is asked of it."""
