"""The memory behind the pages, on device and host, and the copies between. Knows no prefix: page numbers only."""
