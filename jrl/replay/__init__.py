"""Experience replay on the device.

`ring` samples transitions uniformly, `prioritized` by priority; `sequences` samples sequences of rows in either way.
All three use `storage`. `memory` checks in advance whether a buffer fits.
"""
