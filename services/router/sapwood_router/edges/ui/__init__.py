"""The page /ui: its files, and its data about the fleet and routes. Knows no gRPC and no worker."""
