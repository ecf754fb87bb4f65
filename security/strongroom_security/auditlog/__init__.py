"""The audit log: what was done to checkpoints, in segments that each process chains and signs by itself.

`lines`, `events` and `segments` are the format (docs/format.md, 17) and touch nothing.
"""
