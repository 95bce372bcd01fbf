"""Where workers come from: a file, leases, Kubernetes. Know the fleet by its addresses only."""
