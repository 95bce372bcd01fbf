"""What clients of an HTTP/2 server may do, hold and wait for: counts and clocks. Knows no call and no handler."""
