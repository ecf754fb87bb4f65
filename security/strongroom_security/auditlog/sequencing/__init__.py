"""One log of all segments: a transparency log's tree over their lines (docs/format.md, 18), and proofs."""
