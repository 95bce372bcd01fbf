"""How the router reaches other services: calls, health, names, errors. Knows no request."""
