"""`sapwood scaler`: plans workers for a router's load, and starts and stops them."""
