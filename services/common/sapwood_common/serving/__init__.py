"""What every gRPC service has: health, reflection, errors as statuses, draining, probes. Knows no service."""
