"""What runs and lies on this machine: a cluster's processes, a packaged model. Knows no verb."""
