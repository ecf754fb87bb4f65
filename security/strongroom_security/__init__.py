"""Sealing, keys, signing, audit and roles for Strongroom: not in this release."""
