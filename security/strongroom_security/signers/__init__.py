"""Who signs checkpoints: each way to keep a signing key, behind the protocol of `base`.

A policy names them by text; `opening` turns the text into an object. What a signature says of its signer is
the public key's id, and who is believed is decided elsewhere.
"""
