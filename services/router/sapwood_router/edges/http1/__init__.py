"""HTTP/1.1 on the event loop: bytes to requests and back. Knows no path, no API and nothing of Sapwood but errors."""
