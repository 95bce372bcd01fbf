"""A cluster's processes and a packaged model on this machine. Knows no verb."""
