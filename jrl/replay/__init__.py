"""Experience replay on the device.

`ring` samples transitions uniformly, `prioritized` by priority, `sequences` samples stretches of rows either way; all
three stand on `storage`. `memory` says beforehand whether a buffer fits.
"""
