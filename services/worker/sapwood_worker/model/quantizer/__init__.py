"""Makes a checkpoint in few bits of one in many: calibration by a text, rounding, writing. Knows no request and no step."""
