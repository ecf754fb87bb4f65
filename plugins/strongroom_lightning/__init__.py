"""The front end for Lightning."""
