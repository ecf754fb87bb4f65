"""A transparency log by the C2SP specifications: entries are bytes, and nothing here knows what they say.

`merkle` is the tree, `tiles` its files, `notes`, `notekeys` and `checkpoints` are what is signed, `edwards`
says which keys are none, `witnesses` and `witnessing` are who else vouches for it, `reading` and `writing`
bring it from and to a store, and `proofs` are for whoever has neither.
"""
