"""The audit log: what was done to checkpoints, in segments that each process chains and signs by itself.

- `format`: lines, events, segments; pure (docs/format.md, 17).
- `recording`: what a process puts on record, and how that comes to the sink.
- `listing`: the segments of a sink.
- `sequencing`: one tree over all of them, and proofs (docs/format.md, 18); `strongroom_security.tlog` is the
  tree itself.
- `verifying`: whether the log is as it was written.
- `asking`: an index of it, and questions.
- `alerting`, `reconciling`: what somebody should look at, and what went round the log.
"""
