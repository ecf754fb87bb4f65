"""The format of the log (docs/format.md, 17): lines, events, segments. Pure: it touches nothing."""
