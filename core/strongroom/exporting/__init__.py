"""A checkpoint's model as a folder of safetensors that stands alone.

`export` does it; which tensors, in which files, from which bytes and into which folder are a module each.
"""
