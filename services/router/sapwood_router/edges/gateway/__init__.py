"""The router as the endpoint picker of a gateway: Envoy's external processing, as the Gateway API inference extension uses it."""
