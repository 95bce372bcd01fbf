"""The page /ui: its files, and what it is told of the fleet and of routes. Knows no gRPC and no worker."""
