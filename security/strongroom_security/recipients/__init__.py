"""Who may open a checkpoint: each way to wrap a checkpoint's key, behind the protocols of `base`.

A policy names them by text; `opening` turns the text into an object. What a keyring says of a
recipient is its opaque id, its kind and what it wrapped, and none of that is ever followed anywhere.
"""
