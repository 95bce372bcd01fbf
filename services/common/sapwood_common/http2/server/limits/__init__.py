"""What clients of an HTTP/2 server may do, hold and wait for."""
